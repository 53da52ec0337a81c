"""Target and drafter averaged."""

from __future__ import annotations

from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("ensemble")
@dataclass(frozen=True)
class Ensemble(LossyRule):
    """The exact test against v = weight·p + (1 - weight)·q. Exact at weight = 1.

    Needs q: exact where the drafts come without (n-gram lookup). A sampled draft is tested against v, on a tree y is
    drawn from it; at temperature 0 v's likeliest token. From transformers (`assistant_ensemble_weight`, no default),
    after arXiv:2604.07622.

    Args:
        weight: of the target, in (0, 1].
    """

    weight: float = parameter(above=0, high=1)

    def law(self, evidence: Evidence) -> Law:
        if self.weight == 1:
            return Law.target(evidence)
        return Law.dense(evidence, lambda at: (self.weight * at.p + (1 - self.weight) * at.q).log())
