"""Several losses at once, each with a weight that may change in the course of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsd_infer.errors import DataError
from fsd_train.losses.base import DraftBatch, Loss, LossOutput, make_loss, reference_of
from fsd_train.losses.schedule import Schedule


@dataclass(frozen=True)
class Part:
    """One loss of a mix: ``label`` is what its values are logged under."""

    label: str
    loss: Loss
    weight: Schedule


class MixLoss:
    """Σ w_i(t)·loss_i, where t is how much of the run has passed (:attr:`DraftBatch.progress`).

    A part whose weight is 0 at the moment is not computed. Logged are, by the label of each part (its name; with a
    number after it where a name occurs again): ``label/loss`` before weighting, ``label/…`` for what the loss itself
    reports, and ``label/weight`` where it changes.

    Args:
        parts: at least one mapping with ``name`` and optionally ``weight`` (a number or a schedule, 1 by default) and
            ``args``.

    Raises:
        DataError: a part is malformed, a weight is negative, or all weights are 0 at an end of the run.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        if not parts:
            raise DataError("loss: the list is empty; name at least one loss.")
        self.parts: list[Part] = []
        seen: Counter[str] = Counter()
        for number, entry in enumerate(parts, start=1):
            name, weight, args = _entry(entry, number)
            seen[name] += 1
            label = name if seen[name] == 1 else f"{name}_{seen[name]}"
            self.parts.append(Part(label, make_loss(name, args), weight))
        for progress, step, when in ((0.0, 0.0, "beginning"), (1.0, torch.inf, "end")):
            if not any(part.weight.at(progress, step) for part in self.parts):
                raise DataError(f"loss: all weights are 0 at the {when} of the run; leave one above 0.")
        found = {where for part in self.parts if (where := reference_of(part.loss)) is not None}
        if len(found) > 1:
            raise DataError(f"loss: one reference at a time, but the mix names {', '.join(sorted(found))}.")
        self.reference = next(iter(found), None)
        self.couples_rows = any(getattr(part.loss, "couples_rows", False) for part in self.parts)

    def __call__(self, batch: DraftBatch) -> LossOutput:
        total: Tensor | None = None
        parts: dict[str, Tensor] = {}
        agreement = None
        for part in self.parts:
            weight = part.weight.at(batch.progress, batch.step)
            if part.weight.moves:
                parts[f"{part.label}/weight"] = torch.full((), weight, device=batch.estimates.device)
            if not weight:
                continue
            out = part.loss(batch)
            total = weight * out.loss if total is None else total + weight * out.loss
            parts[f"{part.label}/loss"] = out.loss.detach()
            parts.update({f"{part.label}/{name}": value for name, value in out.parts.items()})
            agreement = out.agreement if agreement is None else agreement
        if total is None:
            raise DataError(
                f"loss: all weights are 0 when {batch.progress:.0%} of the run have passed; let the schedules overlap."
            )
        return LossOutput(total, parts, agreement)


def build_loss(name: str | Sequence[Mapping[str, Any]], args: dict[str, Any] | None = None) -> Loss:
    """The loss of a recipe: one registered loss, or a mix of several.

    Args:
        name: a registered name, or a list of mappings ``{name, weight, args}``: see :class:`MixLoss`.
        args: arguments of the one loss; those of a list stand in the list.

    Raises:
        UnknownNameError: no loss has that name.
        DataError: an argument that a loss does not take, or a malformed list.
    """
    if isinstance(name, str):
        return make_loss(name, args)
    if args:
        raise DataError("loss_args belongs to a single loss; with a list of losses write args into its entries.")
    return MixLoss(name)


def _entry(entry: Any, number: int) -> tuple[str, Schedule, dict[str, Any]]:
    """(name, weight, arguments) of the ``number``-th entry of a list of losses."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise DataError(f"loss: entry {number} of the list must be a mapping with a name, got {entry!r}.")
    unknown = sorted(set(entry) - {"name", "weight", "args"})
    if unknown:
        raise DataError(f"loss: entry {number} has no key {', '.join(unknown)}; it takes name, weight, args.")
    name = entry["name"]
    weight = Schedule.read(entry.get("weight", 1.0), f"loss: weight of {name}")
    if weight.start < 0 or weight.end < 0:
        raise DataError(f"loss: weight of {name} must not be negative.")
    return name, weight, dict(entry.get("args") or {})
