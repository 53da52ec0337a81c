"""Fuzzy speculative decoding: a gate opens where target and drafter are close, D(p, q) <= T."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from fsd_infer.divergence import divergence
from fsd_infer.errors import FsdError
from fsd_infer.rules._contexts import Contexts
from fsd_infer.rules._laws import (
    GatedRule,
    OpenLaw,
    check_number,
    children_law,
    draft_law,
    strict_closed_law,
)
from fsd_infer.rules.base import RULES


@cache
def _warn_never_opens(name: str) -> None:
    """Says once per divergence that the drafter's vocabulary keeps the gate shut."""
    warnings.warn(
        f"divergence {name!r} is infinite wherever the target has mass outside the drafter's reduced vocabulary, so "
        "this gate never opens. Use js, tv, kl or a top-k form, or a drafter with the full vocabulary.",
        stacklevel=2,
    )


@dataclass(frozen=True)
class DivergenceGate(GatedRule):
    """A gate g = [D(p, q) <= T] at every context that has children and a known drafter distribution.

    Args:
        divergence: a name of :data:`fsd_infer.divergence.DIVERGENCES`.
        threshold: T, in the divergence's unit; 0 never opens a gate, inf always does (also where D is infinite).
        budget: nats that open gates may spend per request; None for no limit.
        gate_on: "raw" compares softmax(logits) of both models, "processed" the distributions after the request's
            logits processors. At temperature 0 processed distributions are one-hot and raw ones are compared always.

    Raises:
        UnknownNameError: unknown divergence.
        FsdError: negative or NaN threshold or budget, unknown ``gate_on``.
    """

    divergence: str = "js"
    threshold: float = 0.3
    budget: float | None = None
    gate_on: str = "raw"

    def __post_init__(self) -> None:
        object.__setattr__(self, "divergence", divergence(self.divergence).name)
        object.__setattr__(self, "threshold", check_number(self.name, "threshold", self.threshold))
        if self.budget is not None:
            object.__setattr__(self, "budget", check_number(self.name, "budget", self.budget))
        if self.gate_on not in ("raw", "processed"):
            raise FsdError(f"rule {self.name!r}: gate_on must be 'raw' or 'processed', not {self.gate_on!r}.")

    def gate(self, at: Contexts) -> Tensor:
        if self.threshold == 0:
            return torch.zeros_like(at.has_q)
        if self.threshold == math.inf:
            return at.has_q
        if at.whole:
            return (self._distance(at) <= self.threshold) & at.has_q
        if bool(at.has_q.all()):
            return self._distance(at) <= self.threshold
        opens = torch.zeros_like(at.has_q)
        index = at.has_q.nonzero().squeeze(-1)
        if index.shape[0] == 0:
            return opens
        return opens.index_copy(0, index, self._distance(at.select(index)) <= self.threshold)

    def _distance(self, at: Contexts) -> Tensor:
        """[R] D(p, q), only to be read where there is a q."""
        measure = divergence(self.divergence)
        if self.gate_on == "processed" and not at.greedy:
            return measure(at.scores, at.q_scores)
        draft_ids = at.evidence.tree.draft_ids
        if draft_ids is not None and measure.infinite_on_reduced_vocabulary:
            _warn_never_opens(measure.name)
        return measure.with_reduced_drafter(*at.compared, draft_ids, at.compared_rows)

    def describe(self) -> dict[str, object]:
        return {
            "rule": self.name,
            **divergence(self.divergence).describe(),
            "threshold": self.threshold,
            "gate_on": self.gate_on,
            "budget": self.budget,
            "budget_unit": "nats",
        }


@dataclass(frozen=True)
class Fuzzy(DivergenceGate):
    """The "or" rule: a draft is accepted if the exact rule accepts it or the gate is open.

    On a deterministic tree: y ~ p; if the gate is open and y is no child, y ~ p restricted to the children C, so the
    law is p(. | C) and its cost -ln p(C). A sampled draft is accepted where the gate is open, so the law is q there.
    A token that the processed target forbids is never emitted. T = 0 is the exact rule, token for token.
    """

    name = "fuzzy"
    over_children = True

    def open_law(self, at: Contexts, closed: Tensor) -> OpenLaw:
        return children_law(at, closed)


@dataclass(frozen=True)
class FuzzyStrict(DivergenceGate):
    """The rule as first published: where the gate is open the token is the drafter's, y ~ q, elsewhere y ~ p.

    On a tree a y that is no child is emitted and ends the round, open gate or not. It may emit tokens that the
    processed target forbids; its cost KL(q || p) is infinite then, so that a budget excludes it.
    """

    name = "fuzzy-strict"

    def open_law(self, at: Contexts, closed: Tensor) -> OpenLaw:
        return draft_law(at, closed)

    def closed_law(self, at: Contexts) -> Tensor:
        return strict_closed_law(at)


RULES.register("fuzzy")(Fuzzy)
RULES.register("fuzzy-strict")(FuzzyStrict)
