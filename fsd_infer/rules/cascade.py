"""Speculative cascades, token by token: the drafter is trusted on tokens that the target likes nearly best."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("cascade-token")
@dataclass(frozen=True)
class CascadeToken(LossyRule):
    """With A = {x: p(x) >= (1 - alpha)·p_max} the law is q + η·p on A and η·p elsewhere, η = 1 - q(A). Exact at
    alpha < 0, where A is empty; at alpha = 0 A holds the target's likeliest token.

    Needs q: exact where the drafts come without (n-gram lookup). A sampled draft is tested against the law, on a tree
    y is drawn from it. At temperature 0 the drafter's likeliest token if it is in A, else the target's. From
    arXiv:2405.19261 (the variant "token v3"); the default is that of github.com/chiatzenw-cur/lossy-token-eff. A
    variant that tests drafts outside A exactly is `fuzzy:js:inf` with the floor 1 - alpha.

    Args:
        alpha: at most 1, where A holds every token.
    """

    alpha: float = parameter(0.3, high=1)

    def law(self, evidence: Evidence) -> Law:
        if self.alpha < 0:
            return Law.target(evidence)
        return Law.trusting(evidence, evidence.log_p_max + math.log1p(-self.alpha) if self.alpha < 1 else -math.inf)
