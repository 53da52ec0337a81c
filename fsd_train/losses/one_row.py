"""Losses that are a weighted mean of one value per row: a function of two distributions is all they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, Loss, LossOutput, with_features
from fsd_train.losses.rows import Distributions, RowFunction, mean_of_rows
from fsd_train.types import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(eq=False)
class OneRowLoss(Loss):
    """weight·x + w_feature·SmoothL1(estimate, feature), each a weighted mean over supervised rows.

    :func:`row_loss` makes subclasses.

    Args:
        weight: weight of the value x.
        w_feature: weight of the ``eagle`` loss's feature term; 0 omits it.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    weight: PositiveFloat = 1.0
    w_feature: NonNegativeFloat = 0.0
    chunk_size: PositiveInt | None = None

    name: ClassVar[str]
    function: ClassVar[RowFunction]

    def __call__(self, batch: DraftBatch) -> LossOutput:
        mean, agree = mean_of_rows(self.function, batch, self.chunk_size)
        parts = {f"{self.name}_loss": mean.detach()}
        return with_features(self.w_feature, batch, LossOutput(self.weight * mean, parts, agree))


def row_loss(name: str) -> Callable[[Distributions], type[OneRowLoss]]:
    """Make a loss of a function and register it under a name.

    The function maps the target's log p and the drafter's log q, [n, Vd] each, fp32 and normalised over the draft
    vocabulary, to one value per row [n]. It is differentiable in log q. The loss raises DataError if it is not so.

    Returns:
        a decorator, which replaces the function by the class of the loss
    """

    def made(function: Distributions) -> type[OneRowLoss]:
        def checked(log_p: Tensor, log_q: Tensor) -> Tensor:
            values = function(log_p, log_q)
            if not isinstance(values, Tensor) or values.shape != log_q.shape[:1]:
                found = f"the shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.80}"
                raise DataError(
                    f"loss {name!r} returned {found} for {log_q.shape[0]} rows: return one "
                    "value per row, for example by .sum(-1)."
                )
            if torch.is_grad_enabled() and not values.requires_grad:
                raise DataError(f"loss {name!r} has no gradient: compute its values from log_q.")
            return values

        doc = f"{(function.__doc__ or function.__name__).strip()}\n\n    A loss of one value per row, see OneRowLoss."
        facts = {
            "name": name, "function": RowFunction.of_one(checked),
            "__doc__": doc, "__module__": function.__module__,
        }  # fmt: skip
        kind: type[OneRowLoss] = type(function.__name__, (OneRowLoss,), facts)
        LOSSES.register(name)(kind)
        return kind

    return made
