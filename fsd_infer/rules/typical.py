"""Typical acceptance: a draft passes if the target finds it plausible, given how unsure it is itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("typical")
@dataclass(frozen=True)
class Typical(LossyRule):
    """A draft passes if p(x) >= min(epsilon, delta·e^-H(p)), H the entropy. Exact at epsilon = delta = inf.

    A sampled draft that does not pass is still tested exactly. On a tree p is restricted to the children that pass; at
    temperature 0 the likeliest of them is emitted, and p is that of temperature 1. From Medusa (arXiv:2401.10774),
    which has no sampled drafts, is exact at temperature 0, and sets these defaults.

    Args:
        epsilon: the bound on p(x) where the target is sure of itself.
        delta: the bound relative to e^-H.
    """

    epsilon: float = parameter(0.09, low=0, infinite=True)
    delta: float = parameter(0.3, low=0, infinite=True)

    def law(self, evidence: Evidence) -> Law:
        log_epsilon, log_delta = (math.log(x) if x > 0 else -math.inf for x in (self.epsilon, self.delta))
        return Law.passing(evidence, (log_delta - evidence.entropy).clamp_max(log_epsilon))
