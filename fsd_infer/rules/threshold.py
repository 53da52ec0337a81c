"""SGLang's two thresholds: a draft passes if it is likely enough, or if its odds pass after being raised."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("threshold")
@dataclass(frozen=True)
class Threshold(LossyRule):
    """A draft passes if p(x) >= single; else it is tested as exact decoding would, with p/acc in place of p. Exact at
    single = acc = 1, the defaults.

    On a tree p is restricted to the children that pass; where none does, some child is emitted with probability
    min(1, p(C)/acc). From SGLang (`--speculative-accept-threshold-single`, `-acc`), whose tree test goes down equally
    often, but prefers earlier siblings, and which ignores both at temperature 0, where this is the likeliest token of
    the law made from p at temperature 1.

    Args:
        single: in [0, 1]; 1 for no such threshold.
        acc: in (0, 1].
    """

    single: float = parameter(1.0, low=0, high=1)
    acc: float = parameter(1.0, above=0, high=1)

    def law(self, evidence: Evidence) -> Law:
        if self.single == self.acc == 1:
            return Law.target(evidence)
        cutoff = math.log(self.single) if 0 < self.single < 1 else math.inf if self.single else -math.inf
        return Law.passing(evidence, cutoff, lambda p: p / self.acc)
