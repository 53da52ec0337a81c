"""The input and output of every loss, schedules of their numbers, and the registry of losses."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_core.former import Renamed
from fsd_core.registry import Registry
from fsd_core.tensors import to_device
from fsd_train.types import NonNegativeFloat, PositiveFloat

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target


TINY = 1e-6  # least divisor of a sum of weights


@dataclass(frozen=True)
class LMHead:
    """The target's frozen LM head, or the rows of it that belong to the draft vocabulary.

    logits = cap·tanh(scale·(h Wᵀ + b)/cap), without tanh if there is no cap.

    Attributes:
        weight: [Vd, H].
        bias: [Vd] or None.
        scale: factor on the logits (families with a logit scale).
        cap: soft cap on the logits or None.
        ids: [Vd] target id of each row; None if Vd = V or if unknown.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None
    ids: Tensor | None = None

    @classmethod
    def of(cls, target: Target, ids: Tensor | None = None) -> LMHead:
        """Return the target's LM head, or its rows for the ids [Vd]."""
        weight, bias = target.lm_head_rows(ids)
        factor = getattr(target.config, "logit_scale", None)
        divisor = getattr(target.config, "logits_scaling", None)
        scale = float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)
        return cls(weight.detach(), bias, scale, getattr(target.config, "final_logit_softcapping", None), ids)

    def joined(self, other: LMHead) -> LMHead:
        """Concatenate the rows of two parts of one LM head."""
        bias = None if self.bias is None or other.bias is None else torch.cat([self.bias, other.bias])
        ids = None if self.ids is None or other.ids is None else torch.cat([self.ids, other.ids])
        return replace(self, weight=torch.cat([self.weight, other.weight]), bias=bias, ids=ids)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., Vd] in fp32 from hidden [..., H]; the product runs in the weight's dtype."""
        return self.scale_and_cap(
            torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).float()
        )

    def scale_and_cap(self, products: Tensor) -> Tensor:
        """Apply the family's scale and soft cap to h Wᵀ + b [..., Vd]."""
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def grad_hidden(self, logits: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient [..., H] on the input, given logits and the fp32 gradient on them, [..., Vd] each."""
        return self.grad_products(logits, grad) @ self.weight

    def grad_products(self, logits: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient on h Wᵀ + b in the weight's dtype; arguments as of :meth:`grad_hidden`."""
        if self.cap is not None:
            grad = grad * (1 - (logits / self.cap) ** 2)
        if self.scale != 1.0:
            grad = grad * self.scale
        return grad.to(self.weight.dtype)


@dataclass(frozen=True)
class LossIndex(Renamed):
    """The supervised rows of a batch: R drafts, each of one chain step at one of N positions, sorted by position.

    A row at position i predicts token i+2 from the estimate of feature i+1 (:mod:`fsd_train.models.unroll` defines the
    indexing). Every position has a row of step 0. Rows and positions of weight 0 are padding to
    static shapes (:attr:`DraftBatch.compiled`); losses leave them out.

    Attributes:
        position: [N] index i in the packed sequence, ascending.
        position_index: [R] index of each row's position among the N, ascending.
        step: [R] chain step, from 0.
        weight: [R] fp32.
        chains: [S, C] rows; column c is a chain with all S steps supervised.
        chain_weight: [C] fp32, number of chains that each represents.
        offsets: N+1 numbers in host memory; position n has the rows offsets[n] … offsets[n+1]−1.
        total: scalar, by which losses divide sums over rows: Σ weight of an optimizer step, averaged over its batches.
            All its batches on all ranks have the same total, so the mean of their gradients, which Trainer takes, is
            the gradient of one large batch.
        chain_total: scalar, by which losses divide sums over chains.
    """

    former_members = {"feature": "position_index", "stands_for": "chain_weight", "ends": "offsets"}

    position: Tensor
    position_index: Tensor
    step: Tensor
    weight: Tensor
    chains: Tensor
    chain_weight: Tensor
    offsets: Sequence[int]
    total: Tensor
    chain_total: Tensor

    def to(self, device: torch.device) -> LossIndex:
        """Copy to a device without waiting for it: integers in one transfer, other numbers in another."""
        on_device: dict[str, Any] = {}
        for names in (
            ("position", "position_index", "step", "chains"),
            ("weight", "chain_weight", "total", "chain_total"),
        ):
            values = [getattr(self, name) for name in names]
            flat = to_device(torch.cat([value.flatten() for value in values]), device)
            parts = flat.split([value.numel() for value in values])
            on_device |= {name: part.view(value.shape) for name, part, value in zip(names, parts, values, strict=True)}
        return replace(self, **on_device)

    @property
    def counted(self) -> Tensor:
        """[R] bool, False for padding and for rows that :meth:`DraftBatch.only` leaves out."""
        return self.weight > 0

    def sum_by_step(self, values: Tensor) -> Tensor:
        """Sum values [..., R] over the rows of each step: [..., S]."""
        return values.new_zeros(*values.shape[:-1], len(self.chains)).index_add(-1, self.step, values)


@dataclass(frozen=True)
class DraftBatch(Renamed):
    """A batch of predictions: an estimate per row, a feature per position.

    Attributes:
        estimates: [R, H] outputs of the head.
        features: [N, H] features of the target.
        rows: step, position and weight of each estimate.
        target_lm_head: the target's LM head over the draft vocabulary.
        own_lm_head: the drafter's trained LM head over the draft vocabulary; None if it shares the target's.
        feature_scale: [H] divisor of the features in the head, or None.
        reference: [R, H] estimates of a frozen reference drafter on the same inputs, or None.
        progress: completed share of the run, 0 to 1; 1 outside training, where schedules have ended.
        step: completed optimizer steps.
        compiled: whether functions of rows are compiled. Then every position has a row of each step, and positions and
            chains are padded to one of a few numbers.
        confidence: [R] logits of a confidence head, or None (:mod:`fsd_train.losses.confidence`).
    """

    former_members = {"head": "target_lm_head", "own_head": "own_lm_head", "draft_head": "draft_lm_head"}

    estimates: Tensor
    features: Tensor
    rows: LossIndex
    target_lm_head: LMHead
    feature_scale: Tensor | None = None
    own_lm_head: LMHead | None = None
    reference: Tensor | None = None
    progress: float = 1.0
    step: float = math.inf
    compiled: bool = False
    confidence: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """[R] weights of the rows."""
        return self.rows.weight

    def only(self, chosen: Tensor) -> DraftBatch:
        """Set the weight of all rows but those ``chosen`` [R] to 0, and lower their total by the same share."""
        weights = self.weights * chosen
        share = weights.sum() / self.weights.sum().clamp_min(TINY)
        return replace(self, rows=replace(self.rows, weight=weights, total=self.rows.total * share))

    @property
    def draft_lm_head(self) -> LMHead:
        """The LM head that is applied to the estimates."""
        return self.target_lm_head if self.own_lm_head is None else self.own_lm_head


@dataclass
class LossOutput:
    """The value of a loss, with figures to log.

    Attributes:
        loss: differentiable scalar.
        parts: detached scalars to log, by name.
        agreement: [R] bool: drafter and target have the same most likely token of the draft vocabulary. None if not
            computed.
    """

    loss: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    agreement: Tensor | None = None


@dataclass(frozen=True)
class Schedule:
    """A number that moves from ``start`` to ``end`` in the first part of a run and then stays.

    Attributes:
        start, end: the values.
        over: length of the first part: a share of the run if at most 1, else a number of optimizer steps.
        kind: "linear", "cosine" (half a period), or "constant" (``start`` during the first part, then ``end``).
    """

    start: NonNegativeFloat
    end: NonNegativeFloat
    over: PositiveFloat = 1.0
    kind: Literal["linear", "cosine", "constant"] = "linear"

    @classmethod
    def of(cls, value: float | Schedule) -> Schedule:
        """Wrap a number in a constant schedule."""
        return value if isinstance(value, Schedule) else cls(value, value)

    @property
    def moves(self) -> bool:
        """Whether the value ever changes."""
        return self.start != self.end

    def at(self, progress: float, step: float) -> float:
        """Return the value after the share ``progress`` (0 to 1) of the run and ``step`` optimizer steps."""
        elapsed = min(max((progress if self.over <= 1 else step) / self.over, 0.0), 1.0)
        weights = {
            "linear": elapsed, "cosine": 0.5 * (1 - math.cos(math.pi * elapsed)), "constant": float(elapsed >= 1)
        }  # fmt: skip
        weight = weights[self.kind]
        return self.end if weight == 1 else self.start + (self.end - self.start) * weight


class Loss(ABC):
    """A loss; its constructor takes the ``init_args`` of a recipe.

    Attributes:
        reference: directory of the exported drafter that fills :attr:`DraftBatch.reference`, or None.
        couples_rows: whether a row's value depends on other rows.
        w_feature: weight of the term that compares estimates with features.
        parts: component losses.
    """

    reference: str | None = None
    couples_rows: bool = False
    w_feature: float = 0.0
    parts: Sequence[Loss] = ()

    @abstractmethod
    def __call__(self, batch: DraftBatch) -> LossOutput: ...


def check_output(out: Any, loss: Loss, rows: int) -> None:
    """Raise DataError, which names the loss, unless it returned a :class:`LossOutput` of so many rows, with a gradient
    where those are taken.
    """
    if not isinstance(out, LossOutput):
        fault = f"returned {out!r:.60}: return LossOutput(loss)"
    elif not isinstance(out.loss, Tensor) or out.loss.shape or not out.loss.is_floating_point():
        fault = f"returned {out.loss!r:.60} as LossOutput.loss: give one number of floats, for example weighted_mean()"
    elif torch.is_grad_enabled() and not out.loss.requires_grad:
        fault = "has no gradient: compute LossOutput.loss from the drafter's outputs, not detached"
    elif not isinstance(out.parts, dict) or not all(isinstance(name, str) for name in out.parts):
        fault = f"returned {out.parts!r:.60} as LossOutput.parts: give a dict of scalars by name"
    elif out.agreement is not None and (out.agreement.shape != (rows,) or out.agreement.dtype != torch.bool):
        fault = f"returned LossOutput.agreement {tuple(out.agreement.shape)} {out.agreement.dtype}: give [{rows}] bool"
    else:
        return
    raise DataError(f"the loss {type(loss).__name__} {fault}.")


LOSSES: Registry[Callable[..., Loss]] = Registry("loss", takes_yours=True)


def as_loss(loss: Loss | str) -> Loss:
    """Return a loss unchanged, or build the one with this name with its defaults.

    Raises:
        UnknownNameError: the name is unknown.
        DataError: the loss needs arguments.
    """
    if isinstance(loss, Loss):
        return loss
    kind = LOSSES.get(loss)
    needed = [name for name, value in inspect.signature(kind).parameters.items() if value.default is value.empty]
    if needed:
        raise DataError(f"loss {loss!r} needs {', '.join(needed)}: give it as class_path and init_args.")
    return kind()


def reference_of(loss: Loss) -> str | None:
    """Return the directory of the reference drafter that a loss or one of its parts needs, or None."""
    return loss.reference or next(filter(None, map(reference_of, loss.parts)), None)


def has_feature_term(loss: Loss) -> bool:
    """Return whether a loss or one of its parts compares estimates with features."""
    return bool(loss.w_feature) or any(map(has_feature_term, loss.parts))


def weighted_mean(values: Tensor, rows: LossIndex) -> Tensor:
    """Return the scalar Σ w·x / total of values [R]: the batch's part of the mean over an optimizer step's rows."""
    return (values * rows.weight).sum() / rows.total.clamp_min(TINY)


def batch_mean(values: Tensor, rows: LossIndex) -> Tensor:
    """Return the scalar Σ w·x / Σ w of values [R] over a batch's own rows, detached, for logs; 0 without rows."""
    return (values.detach() * rows.weight).sum() / rows.weight.sum().clamp_min(TINY)


def feature_distance(batch: DraftBatch) -> Tensor:
    """Return SmoothL1(estimate, feature) per row, averaged over the H dimensions: [R] fp32, differentiable.

    Both are divided by ``feature_scale`` if the head has one, so that outlier dimensions do not dominate.
    """
    estimates, features = batch.estimates, batch.features
    if batch.feature_scale is not None:
        estimates = estimates / batch.feature_scale.to(estimates.dtype)
        features = features / batch.feature_scale.to(features.dtype)
    expected = features.to(estimates.dtype).index_select(0, batch.rows.position_index)
    return torch.nn.functional.smooth_l1_loss(estimates, expected, reduction="none").mean(-1, dtype=torch.float32)


def with_features(weight: float, batch: DraftBatch, out: LossOutput) -> LossOutput:
    """Add weight times the mean :func:`feature_distance` of the supervised rows to a loss."""
    if not weight:
        return out
    feature = weighted_mean(feature_distance(batch), batch.rows)
    return replace(out, loss=out.loss + weight * feature, parts={**out.parts, "feature_loss": feature.detach()})
