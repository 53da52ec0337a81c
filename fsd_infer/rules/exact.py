"""Exact speculative decoding: the output's law is the target's."""

from __future__ import annotations

from dataclasses import dataclass

from fsd_infer.rules.base import RULES, Rule
from fsd_infer.rules.contexts import Contexts
from fsd_infer.rules.laws import Law


@RULES.register("exact")
@dataclass(frozen=True)
class Exact(Rule):
    """Lossless. On a deterministic tree y ~ p and y goes down if it is a child, which no rule with law p betters; a
    sampled draft x is accepted with probability min(1, p(x)/q(x)), else the residual (p - q)+ is drawn from."""

    def law(self, at: Contexts) -> Law:
        return Law.target(at)
