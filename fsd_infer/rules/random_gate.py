"""A gate that opens at random: the control that every claim about a better gate is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("random")
@dataclass(frozen=True)
class RandomGate(LossyRule):
    """`fuzzy`, but each gate opens with probability ``rate``, independently of the models. Exact at rate = 0.

    Args:
        rate: in [0, 1].
    """

    rate: float = parameter(low=0, high=1)

    def law(self, evidence: Evidence) -> Law:
        return Law.passing(evidence, -math.inf).where(evidence.has_q & (evidence.coin < self.rate))
