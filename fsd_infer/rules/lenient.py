"""Lenience: drafts are tested as if the drafter had been less sure of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("lenient")
@dataclass(frozen=True)
class Lenient(LossyRule):
    """Accept a draft with probability min(1, p/(lenience·q)), so that no token's probability exceeds p/lenience. Exact
    at lenience = 1.

    A sampled draft that fails is replaced from (p - q)+. On a tree some child is emitted with probability
    min(1, p(C)/lenience). At temperature 0 the likeliest token of that law. From Leviathan et al. (arXiv:2211.17192,
    appendix), which sets no default; DistillSpec's lossy mode (arXiv:2310.08461).

    Args:
        lenience: in (0, 1].
    """

    lenience: float = parameter(above=0, high=1)

    def law(self, evidence: Evidence) -> Law:
        if self.lenience == 1:
            return Law.target(evidence)
        return Law.passing(evidence, math.inf, lambda p: p / self.lenience)
