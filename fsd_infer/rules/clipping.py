"""The law closest to q that costs no more than a tilted one: what sampled drafts of a lifted law are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 24


def clipped(log_p: Tensor, log_q: Tensor, gain: Tensor) -> Tensor:
    """ln r [R, V] of r = clip(q, p/Z, p·e^gain/Z), Z such that r adds up to 1: maximises Σ gain·min(r, q) - KL(r || p).

    Newton's method within a bracket on the sum, which is piecewise linear in 1/Z and rises with it. The number of
    steps is fixed, so that nothing waits for a device; what is left of an error is scaled away.

    Args:
        log_p, log_q: [R, V] ln p and ln q, -inf where they are 0.
        gain: [R, V], at least 0.
    """
    low, high = -gain.amax(-1, keepdim=True), torch.zeros_like(gain[:, :1])  # ln(1/Z) lies between
    log_a = high
    for _ in range(_STEPS):
        law, total, slope = _clip(log_p, log_q, gain, log_a)
        low, high = torch.where(total < 1, log_a, low), torch.where(total >= 1, log_a, high)
        newton = log_a + ((1 - total + slope).clamp_min(0.0) / slope).log()
        inside = (newton >= low) & (newton <= high)
        log_a = torch.where(inside, newton, (low + high) / 2)
    law, total, _ = _clip(log_p, log_q, gain, log_a)
    return law - total.log()


def _clip(log_p: Tensor, log_q: Tensor, gain: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ln of clip(q, a·p, a·p·e^gain) [R, V]; its sum [R, 1], and the part of that which is proportional to a."""
    least = log_p + log_a
    law = log_q.clamp(least, least + gain)
    r = law.exp()
    return law, r.sum(-1, keepdim=True), r.masked_fill(law == log_q, 0.0).sum(-1, keepdim=True)
