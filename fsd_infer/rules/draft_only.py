"""What the drafter alone would say. The far end of every comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law


@RULES.register("draft-only")
@dataclass(frozen=True)
class DraftOnly(LossyRule):
    """y ~ q at every context that has children of known distribution, y ~ p elsewhere: where the drafts end, and where
    they come from a drafter without distributions (n-gram lookup). Exact at budget = 0 only.

    Args:
    """

    def law(self, evidence: Evidence) -> Law:
        return Law.trusting(evidence, -math.inf)
