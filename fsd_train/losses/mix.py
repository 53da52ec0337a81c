"""A weighted sum of losses, with weights that may follow a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, Loss, LossOutput, Schedule, as_loss, reference_of
from fsd_train.types import NonNegativeFloat


@dataclass(frozen=True)
class LossTerm:
    """One loss of a mix, by name or with arguments, and its weight."""

    loss: Loss | str
    weight: NonNegativeFloat | Schedule = 1.0


class MixLoss(Loss):
    """Σ w_i(t)·loss_i, where t is the completed share of the run (:attr:`DraftBatch.progress`).

    A part with weight 0 is not computed. Each part logs ``label/loss`` before weighting, ``label/…`` for the figures of
    the loss, and ``label/weight`` if it changes. The label is the loss's name, with a number if the name repeats.

    Args:
        parts: at least one.

    Raises:
        DataError: there is no part, all weights are 0 at an end of the run, or parts name two references.
    """

    def __init__(self, parts: list[LossTerm]) -> None:
        if not parts:
            raise DataError("mix: parts is empty; name at least one loss.")
        self.parts: Sequence[Loss] = [as_loss(part.loss) for part in parts]
        self.weights = [Schedule.of(part.weight) for part in parts]
        self.labels: list[str] = []
        seen: Counter[str] = Counter()
        for part, loss in zip(parts, self.parts, strict=True):
            name = part.loss if isinstance(part.loss, str) else name_of(loss)
            seen[name] += 1
            self.labels.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
        for progress, step, when in ((0.0, 0.0, "beginning"), (1.0, torch.inf, "end")):
            if not any(weight.at(progress, step) for weight in self.weights):
                raise DataError(f"mix: all weights are 0 at the {when} of the run; keep one above 0.")
        references = {where for loss in self.parts if (where := reference_of(loss)) is not None}
        if len(references) > 1:
            raise DataError(f"mix: two references, {', '.join(sorted(references))}; use one for all parts.")
        self.couples_rows = any(loss.couples_rows for loss in self.parts)

    def __call__(self, batch: DraftBatch) -> LossOutput:
        total: Tensor | None = None
        parts: dict[str, Tensor] = {}
        agreement = None
        for part, label, schedule in zip(self.parts, self.labels, self.weights, strict=True):
            weight = schedule.at(batch.progress, batch.step)
            if schedule.moves:
                parts[f"{label}/weight"] = torch.full((), weight, device=batch.estimates.device)
            if not weight:
                continue
            out = part(batch)
            total = weight * out.loss if total is None else total + weight * out.loss
            parts[f"{label}/loss"] = out.loss.detach()
            parts.update({f"{label}/{name}": value for name, value in out.parts.items()})
            agreement = out.agreement if agreement is None else agreement
        if total is None:
            raise DataError(f"mix: all weights are 0 at {batch.progress:.0%} of the run; let the schedules overlap.")
        return LossOutput(total, parts, agreement)


def name_of(loss: Loss) -> str:
    """Return a loss's registered name, or the name of its class."""
    name = getattr(loss, "name", None)
    return name or next((name for name in LOSSES if LOSSES.get(name) is type(loss)), type(loss).__name__)
