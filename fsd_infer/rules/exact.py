"""Exact speculative decoding: the output's law is the target's."""

from __future__ import annotations

from dataclasses import dataclass

from fsd_infer.rules._contexts import Contexts, Decision
from fsd_infer.rules._laws import exact_law
from fsd_infer.rules._walk import walk
from fsd_infer.rules.base import RULES, Rule, Verdict, Verification


@dataclass(frozen=True)
class Exact(Rule):
    """Lossless. On a deterministic tree y ~ p and y goes down if it is a child, which no rule with law p betters; a
    sampled draft x is accepted with probability min(1, p(x)/q(x)), else the residual (p - q)+ is drawn from."""

    name = "exact"

    def decide(self, at: Contexts) -> Decision:
        return Decision.without_gate(exact_law(at))

    def __call__(self, round: Verification) -> Verdict:
        return walk(round, self.decide, gated=False)

    def describe(self) -> dict[str, object]:
        return {"rule": self.name}


RULES.register("exact")(Exact)
