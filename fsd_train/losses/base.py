"""What every loss sees and returns."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.errors import DataError
from fsd_infer.registry import Registry

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target


@dataclass(frozen=True)
class LMHead:
    """The target's frozen LM head, or the rows of it that belong to the draft vocabulary.

    logits = cap·tanh(scale·(h Wᵀ + b)/cap), without tanh if there is no cap.

    Attributes:
        weight: [Vd, H].
        bias: [Vd] or None.
        scale: factor on the logits (families with a logit scale).
        cap: soft cap on the logits or None.
        ids: [Vd] target id of each row; None if Vd = V, or where nobody asks.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    ids: Tensor | None = None

    @classmethod
    def of(cls, target: Target, ids: Tensor | None = None) -> LMHead:
        """The target's LM head, restricted to the ids [Vd] where given."""
        weight, bias = target.lm_head_rows(ids)
        factor = getattr(target.config, "logit_scale", None)
        divisor = getattr(target.config, "logits_scaling", None)
        scale = float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)
        return cls(weight.detach(), bias, scale, getattr(target.config, "final_logit_softcapping", None), ids)

    def joined(self, other: LMHead) -> LMHead:
        """The rows of both, of one LM head, in this order."""
        bias = None if self.bias is None or other.bias is None else torch.cat([self.bias, other.bias])
        ids = None if self.ids is None or other.ids is None else torch.cat([self.ids, other.ids])
        return replace(self, weight=torch.cat([self.weight, other.weight]), bias=bias, ids=ids)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., Vd] in fp32; the product runs in the weight's dtype."""
        return self.finish(torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float())

    def finish(self, products: Tensor) -> Tensor:
        """h Wᵀ + b [..., Vd] -> logits: the family's scale and soft cap."""
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def grad_hidden(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient [..., H] on the input, given the logits and the fp32 gradient on them, [..., Vd] each."""
        return self.grad_products(logits, grad) @ self.weight

    def grad_products(self, logits: Tensor, grad: Tensor) -> Tensor:
        """The gradient on h Wᵀ + b in the weight's dtype, given the logits and the fp32 gradient on them [..., Vd]."""
        if self.cap is not None:
            grad = grad * (1 - (logits / self.cap) ** 2)
        if self.scale != 1.0:
            grad = grad * self.scale
        return grad.to(self.weight.dtype)


@dataclass(frozen=True)
class Rows:
    """What a batch supervises: R rows, each the draft of one step at one of N positions, sorted by position.

    Row r predicts token i+2 from the estimate of feature i+1, where i is its position (:mod:`fsd_train.models.unroll`
    has the indexing). Every position has a row of step 0.

    Attributes:
        position: [N] flat index b·(M−1) + i, ascending.
        feature: [R], which of the N positions it stands at, ascending.
        step: [R], which draft of its chain it is, from 0.
        weight: [R] fp32.
        chains: [S, C] rows: column c is a chain whose S steps are all here.
        ends: N+1 numbers in host memory: the rows of position n are ends[n] … ends[n+1]−1.
    """

    position: Tensor
    feature: Tensor
    step: Tensor
    weight: Tensor
    chains: Tensor
    ends: Sequence[int]

    def to(self, device: torch.device) -> Rows:
        """The same on a device, which is not waited for."""
        names = ("position", "feature", "step", "weight", "chains")
        moved: dict[str, Any] = {name: to_device(getattr(self, name), device) for name in names}
        return replace(self, **moved)

    def sum_by_step(self, values: Tensor) -> Tensor:
        """Sums [S] of values [R] over the rows of each step."""
        return values.new_zeros(len(self.chains)).index_add(0, self.step, values)


@dataclass(frozen=True)
class DraftBatch:
    """One batch of predictions: an estimate per row, a feature per position.

    Attributes:
        estimates: [R, H], the head's output.
        features: [N, H], the target's own feature.
        rows: which step and position each estimate stands for, and its weight.
        head: the target's LM head over the draft vocabulary.
        own_head: the drafter's LM head over the same, where it has one of its own: its weight is trained.
        feature_scale: [H] that the head divides features by, or None.
        reference: [R, H], a frozen reference drafter's estimates on the same inputs, or None.
        progress: share of the run that has passed, 0 to 1; 1 outside of training, so that schedules are at their end.
        step: optimiser steps that have passed.
    """

    estimates: Tensor
    features: Tensor
    rows: Rows
    head: LMHead
    feature_scale: Tensor | None = None
    own_head: LMHead | None = None
    reference: Tensor | None = None
    progress: float = 1.0
    step: float = math.inf

    @property
    def weights(self) -> Tensor:
        """[R], of the rows."""
        return self.rows.weight

    def with_weights(self, weights: Tensor) -> DraftBatch:
        """The same batch with other weights [R]."""
        return replace(self, rows=replace(self.rows, weight=weights))

    @property
    def draft_head(self) -> LMHead:
        """The LM head that reads the estimates."""
        return self.head if self.own_head is None else self.own_head


@dataclass
class LossOutput:
    """A loss and what was seen on the way.

    Attributes:
        loss: scalar, differentiable.
        parts: detached scalars by name, logged as they are.
        agreement: [R] bool: the drafter's most likely token is the target's (within the draft vocabulary); None
            where a loss does not compute it.
    """

    loss: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    agreement: Tensor | None = None


class Loss(ABC):
    """A loss: its constructor takes what a recipe gives as ``init_args``.

    Attributes:
        reference: directory of an exported drafter whose estimates it wants in :attr:`DraftBatch.reference`, or None.
        couples_rows: whether rows count only together with others.
        w_feature: weight of a term that compares estimates with features.
        parts: losses that it is made of.
    """

    reference: str | None = None
    couples_rows: bool = False
    w_feature: float = 0.0
    parts: Sequence[Loss] = ()

    @abstractmethod
    def __call__(self, batch: DraftBatch) -> LossOutput: ...


LOSSES: Registry[Callable[..., Loss]] = Registry("loss")


def as_loss(loss: Loss | str) -> Loss:
    """A loss itself, or the one registered under a name, with its defaults.

    Raises:
        UnknownNameError: no loss has that name.
        DataError: that loss needs arguments.
    """
    if isinstance(loss, Loss):
        return loss
    kind = LOSSES.get(loss)
    needed = [name for name, value in inspect.signature(kind).parameters.items() if value.default is value.empty]
    if needed:
        raise DataError(f"loss {loss!r} needs {', '.join(needed)}: write it as class_path and init_args.")
    return kind()


def reference_of(loss: Loss) -> str | None:
    """Directory of the reference drafter that a loss, or a part of it, wants, or None."""
    return loss.reference or next(filter(None, map(reference_of, loss.parts)), None)


def has_feature_term(loss: Loss) -> bool:
    """Does a loss, or a part of it, compare estimates with features?"""
    return bool(loss.w_feature) or any(map(has_feature_term, loss.parts))


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Σ w·x / Σ w, a scalar; 0 where all weights are 0. values and weights [R]."""
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)


def feature_distance(batch: DraftBatch) -> Tensor:
    """SmoothL1(estimate, feature) per row, averaged over the H dimensions: [R] fp32, differentiable.

    Taken in the space the head reads: divided by ``feature_scale`` where the head has one, so that outlier dimensions
    do not drown the others.
    """
    estimates, features = batch.estimates, batch.features
    if batch.feature_scale is not None:
        estimates = estimates / batch.feature_scale.to(estimates.dtype)
        features = features / batch.feature_scale.to(features.dtype)
    wanted = features.to(estimates.dtype).index_select(0, batch.rows.feature)
    return torch.nn.functional.smooth_l1_loss(estimates, wanted, reduction="none").mean(-1, dtype=torch.float32)


def with_features(weight: float, batch: DraftBatch, out: LossOutput) -> LossOutput:
    """``out`` and weight·:func:`feature_distance`, its mean over supervised rows; at weight 0 ``out`` itself."""
    if not weight:
        return out
    feature = weighted_mean(feature_distance(batch), batch.weights)
    return replace(out, loss=out.loss + weight * feature, parts={**out.parts, "feature_loss": feature.detach()})
