"""The law against which sampled drafts are tested under a lifted law: the law closest to q at the same cost."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = 24


def clipped(log_p: Tensor, log_q: Tensor, gain: Tensor) -> Tensor:
    """Return ln r [R, V] of r = clip(q, p/Z, p·e^gain/Z), which maximises Σ gain·min(r, q) - KL(r || p).

    Z makes r sum to 1. The sum is piecewise linear and increasing in 1/Z, so bracketed Newton steps find Z. Their
    number is fixed, which avoids a device sync; a final normalisation removes the remaining error.

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
    """ln of clip(q, a·p, a·p·e^gain) [R, V], its sum [R, 1], and the part of the sum proportional to a."""
    least = log_p + log_a
    law = log_q.clamp(least, least + gain)
    r = law.exp()
    return law, r.sum(-1, keepdim=True), r.masked_fill(law == log_q, 0.0).sum(-1, keepdim=True)
