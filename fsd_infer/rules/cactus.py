"""Cactus: constrained acceptance, a draft's probability is raised as far as a bound on the divergence allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.transfer import wide
from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.evidence import Evidence
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter


@RULES.register("cactus")
@dataclass(frozen=True)
class Cactus(LossyRule):
    """The exact test against a target h that favours the draft: h(x) = min(1, p(x) + √(2·delta·p(x)(1-p(x)))), all else
    scaled down. Exact at delta = 0.

    On a tree the same with p(C) for p(x), and KL(h || p) <= ln(1 + 2·delta). At temperature 0 the likeliest token of
    the law. From arXiv:2604.04987, which sets no default.

    Args:
        delta: nats per token, approximately.
    """

    delta: float = parameter(low=0, high=1e6)

    def law(self, evidence: Evidence) -> Law:
        if self.delta == 0:
            return Law.target(evidence)
        if evidence.sampled:  # what it draws instead of a draft depends on the draft
            return Law.dense(evidence, lambda at: _averaged(at.p, at.q, self._raised(at.p)).log())
        return Law.passing(evidence, math.inf, self._raised)

    def _raised(self, p: Tensor) -> Tensor:
        return (p + (2 * self.delta * p * (1 - p)).clamp_min(0.0).sqrt()).clamp_max(1.0)


def _averaged(p: Tensor, q: Tensor, h: Tensor) -> Tensor:
    """[R, V] the law of x ~ q, kept with probability min(1, h(x)/q(x)), else y ~ (h_x - q)+, normalised, where h_x is
    h(x) at x and s(x)·p elsewhere, s = (1 - h)/(1 - p).

    Where x can be rejected (h_x - q)+ is 0 at x, so a rejected x matters by s(x) alone. The tokens with s·p > q come
    first when sorted by q/p, and the x with s(x) > q/p when sorted by s: sums over them are cumulative ones.
    """
    narrow, dtype = p.dtype, wide(p.device)
    p, q, h = (values.to(dtype) for values in (p, q, h))
    ratio = torch.where(p > 0, q / p, torch.inf)
    s = ((1 - h) / (1 - p).clamp_min(1e-30)).clamp(0.0, 1.0)
    by_ratio, order = ratio.sort(-1)
    before = torch.searchsorted(by_ratio, s)  # tokens with q/p < s(x)
    total = s * _sum_of_first(p, order, before) - _sum_of_first(q, order, before)
    # nothing is left where s = 0: such a draft is never rejected
    weight = torch.where(total > 0, (q - h).clamp_min(0.0) / total.clamp_min(1e-30), 0.0)
    by_s, order = s.sort(-1, descending=True)
    before = torch.searchsorted(-by_s, -ratio)  # x with s(x) > q/p
    drawn = p * _sum_of_first(weight * s, order, before) - q * _sum_of_first(weight, order, before)
    return (torch.minimum(q, h) + drawn.clamp_min(0.0)).to(narrow)


def _sum_of_first(values: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """[R, V] sums of the first ``counts`` [R, V] of ``values`` [R, V] in ``order`` [R, V]."""
    return torch.nn.functional.pad(values.gather(-1, order).cumsum(-1), (1, 0)).gather(-1, counts)
