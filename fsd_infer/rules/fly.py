"""FLy: a mismatch is let through where the target is unsure and agrees with the drafts that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fsd_infer.errors import FsdError
from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.tilted import best_path


@RULES.register("fly")
@dataclass(frozen=True)
class Fly(LossyRule):
    """Temperature 0 only. Where the target's token is not drafted, a draft passes if -Σ p ln p over the target's three
    likeliest tokens is at least `entropy` and the next window - 1 drafts below it are all the target's own choice.
    Exact at entropy = inf, and on trees less deep than the window.

    Of several the likeliest is emitted. Refused above temperature 0. From arXiv:2511.22972; defaults of its code.

    Args:
        window: drafts looked at, the mismatch included.
        entropy: nats.
    """

    window: int = parameter(6, low=1, high=1024)
    entropy: float = parameter(0.3, low=0, infinite=True)

    def law(self, evidence: Evidence) -> Law:
        if not evidence.greedy:
            raise FsdError("rule 'fly' compares drafts with the target's likeliest tokens: it needs temperature 0.")
        agrees = evidence.regret == 0
        run = best_path(evidence.tree.ancestors, torch.ones_like(evidence.regret), agrees)
        log_p = evidence.best(3)
        unsure = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1) >= self.entropy
        lift = torch.zeros_like(run).masked_fill(run >= self.window - 1, math.inf)
        return Law.lifted(evidence, lift).where(unsure & ~evidence.some(agrees))
