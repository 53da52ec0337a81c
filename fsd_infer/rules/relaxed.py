"""Relaxed acceptance: a draft passes if it is among the target's best tokens and not much worse than the best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("relaxed")
@dataclass(frozen=True)
class Relaxed(LossyRule):
    """A draft passes if it is among the target's k likeliest tokens and p(x) >= p_max - delta. Exact at k = 0; at
    temperature 0, where the likeliest passing child is emitted and p is that of temperature 1, at k = 1 or delta = 0
    too.

    A sampled draft that does not pass is still tested exactly. On a tree p is restricted to the children that pass.
    From TensorRT-LLM (`relaxed_topk`, `relaxed_delta`; greedy only), the defaults those it recommends for reasoning.

    Args:
        k: how many of the target's tokens may pass.
        delta: how much less likely than the best, in [0, 1].
        relative: p(x) >= delta·p_max instead.
    """

    k: int = parameter(10, low=0, high=2**31 - 1)
    delta: float = parameter(0.6, low=0, high=1)
    relative: bool = False

    def law(self, evidence: Evidence) -> Law:
        if self.k == 0:
            return Law.target(evidence)
        best = evidence.best(self.k)
        p_max = best[..., 0].exp()
        near_best = (p_max * self.delta if self.relative else (p_max - self.delta).clamp_min(0.0)).log()
        return Law.passing(evidence, torch.maximum(best[..., -1], near_best))
