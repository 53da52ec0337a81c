"""Fuzzy speculative decoding: a gate opens where target and drafter are close, D(p, q) <= T."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fsd_infer.divergence import divergence
from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.gates import check_gate, divergence_gate
from fsd_infer.rules.laws import AtContexts, Law, Test
from fsd_infer.rules.parameters import parameter


@dataclass(frozen=True)
class DivergenceGate(LossyRule):
    """A gate g = [D(p, q) <= T] at every context that has children and a known drafter distribution.

    Args:
        divergence: a name of :data:`fsd_infer.divergence.DIVERGENCES`.
        threshold: T, in the divergence's unit, at most its largest value; 0 never opens a gate, inf always does (also
            where D is infinite).
        gate_on: "raw" compares softmax(logits) of both models, "processed" the distributions after the request's
            logits processors. At temperature 0 processed distributions are one-hot and raw ones are compared always.
        floor: an open gate lets no token through whose probability is below this share of the likeliest token's.

    Raises:
        UnknownNameError: unknown divergence.
        FsdError: a number out of range, unknown ``gate_on``.
    """

    divergence: str = "js"
    threshold: float = parameter(0.3, low=0, infinite=True)
    gate_on: Literal["raw", "processed"] = parameter("raw", alias="gate")
    floor: float = parameter(0.0, low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divergence", divergence(self.divergence).name)
        check_gate(self.name, "threshold", self.divergence, self.threshold)

    def gate(self, evidence: Evidence) -> Tensor | AtContexts:
        """Where the gate is open, for :meth:`Law.where`."""
        return divergence_gate(evidence, self.divergence, self.threshold, self.gate_on == "processed")

    def cutoff(self, evidence: Evidence) -> Tensor | float:
        """[B, N] ln p that a token needs to pass the floor."""
        return evidence.log_p_max + math.log(self.floor) if self.floor else -math.inf

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **divergence(self.divergence).describe()}


@RULES.register("fuzzy")
@dataclass(frozen=True)
class Fuzzy(DivergenceGate):
    """The "or" rule: a draft is accepted if the exact rule accepts it or the gate is open. Exact at threshold = 0.

    On a deterministic tree: y ~ p; if the gate is open and y is no child, y ~ p restricted to the children C, so the
    law is p(. | C) and its cost -ln p(C). A sampled draft is accepted where the gate is open, so the law is q there.
    A token that the processed target forbids is never emitted.
    """

    def law(self, evidence: Evidence) -> Law:
        return Law.passing(evidence, self.cutoff(evidence)).where(evidence.has_q).where(self.gate(evidence))


@RULES.register("fuzzy-strict")
@dataclass(frozen=True)
class FuzzyStrict(DivergenceGate):
    """The rule as first published: where the gate is open the token is the drafter's, y ~ q, elsewhere y ~ p. Exact at
    threshold = 0, but on sampled chains it accepts next to nothing there.

    On a tree a y that is no child is emitted and ends the round, open gate or not. It may emit tokens that the
    processed target forbids; its cost KL(q || p) is infinite then, so that a budget excludes it. With a floor, a y ~ q
    below it is replaced by y ~ p.
    """

    def law(self, evidence: Evidence) -> Law:
        law = Law.trusting(evidence, self.cutoff(evidence)).where(self.gate(evidence))
        # a closed gate draws y ~ p whatever the draft is, and goes down if that is what was drawn
        return replace(law, test=Test(evidence.log_p.exp())) if evidence.sampled else law
