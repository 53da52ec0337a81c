"""Distributions r [R, V] that are the best of their kind at contexts with drawn children, computed without a sync."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fsd_core import functional, sampling

_STEPS = 24  # of the search for the constant of a clipped distribution
CLOSE = 1e-6  # error of a distribution's sum at which the search ends; the distribution is then normalised
_NEAR = 3e-5  # the same of a clipped distribution, whose gain is flat at the best sum


def passing_distribution(
    p: Tensor, q: Tensor, fixed: Tensor, passes: Tensor, raise_prob: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return r [R, V] of :meth:`OutputDistribution.passing` at contexts with a drawn child, or above one.

    If fixed candidates pass, r is :func:`least_divergent` of all that always accept: p restricted to them if no child
    was drawn. Otherwise a drawn draft that passes is accepted, and another one with probability min(1, p'/q), where p'
    is raise_prob(p). If it is rejected, the candidates get raise_prob(p(C)) or what is left, and the other tokens the
    rest as (p - q)+.

    Args:
        p, q: [R, V] the target, and the distribution of the drawn child, 0 where none is drawn.
        fixed: [R, V] bool, C.
        passes: [R, V] bool.
        raise_prob: maps a probability to one that is no smaller.
    """
    drawn = torch.where(passes, q, torch.minimum(q, raise_prob(p))).masked_fill(fixed, 0.0)  # emitted as drawn drafts
    left = (1.0 - drawn.sum(-1, keepdim=True)).clamp_min(0.0)
    candidates, residual = p.masked_fill(~fixed, 0.0), (p - q).clamp_min(0.0).masked_fill(fixed, 0.0)
    mass = candidates.sum(-1, keepdim=True)
    of_candidates = torch.minimum(left, raise_prob(mass))
    r = drawn + of_candidates * candidates / mass.clamp_min(sampling.TINY)
    r = r + (left - of_candidates) * residual / residual.sum(-1, keepdim=True).clamp_min(sampling.TINY)
    chosen = fixed & passes
    return torch.where(chosen.any(-1, keepdim=True), least_divergent(p, q.masked_fill(~passes, 0.0), chosen), r)


def least_divergent(p: Tensor, q: Tensor, fixed: Tensor) -> Tensor:
    """Return r [R, V] with the least KL(r || p) of all that always accept a draft: r <= q outside ``fixed``.

    r = a·p on the fixed candidates and min(q, a·p) elsewhere; a makes it sum to 1. Where q is 0, r is p restricted to
    the candidates. Each step finds the a for the tokens that q did not bound so far. a only grows, so bounds stay.

    Args:
        p, q: [R, V] the target, and the distribution of the drawn child.
        fixed: [R, V] bool, with p above 0 somewhere.
    """
    bound = q.masked_fill(fixed, math.inf)
    a = torch.ones_like(p[:, :1])
    for _ in range(_STEPS // 2):
        free = a * p < bound
        used = 1.0 - q.masked_fill(free, 0.0).sum(-1, keepdim=True)
        better = (used / p.masked_fill(~free, 0.0).sum(-1, keepdim=True).clamp_min(sampling.TINY)).clamp_min(1.0)
        is_close = better <= a * (1 + CLOSE)
        a = torch.where(is_close, a, better)  # a row that is done stays as it is, whatever the others need
        if functional.host_all(is_close):
            break
    r = torch.minimum(a * p, bound)
    return r / r.sum(-1, keepdim=True).clamp_min(sampling.TINY)


def clipped_distribution(log_p: Tensor, log_q: Tensor, gain: Tensor) -> Tensor:
    """Return ln r [R, V] of r = clip(q, p/Z, p·e^gain/Z), which maximises Σ gain·min(r, q) - KL(r || p).

    Z makes r sum to 1. The sum is piecewise linear and increasing in 1/Z, so bracketed Newton steps find Z. Their
    number is fixed, which avoids a device sync; a final normalisation removes the remaining error.

    Args:
        log_p, log_q: [R, V] ln p and ln q, -inf where they are 0.
        gain: [R, V], at least 0.
    """
    return search_clipped(log_p, log_q, gain, _STEPS, _NEAR)


@functional.replaceable
def search_clipped(log_p: Tensor, log_q: Tensor, gain: Tensor, steps: int, near: float) -> Tensor:
    """Compute :func:`clipped_distribution`. The search ends where sums are ``near`` 1, or after so many steps."""
    low, high = -gain.amax(-1, keepdim=True), torch.zeros_like(gain[:, :1])  # ln(1/Z) lies between
    log_a = high
    for _ in range(steps):
        log_r, total, slope = _clip(log_p, log_q, gain, log_a)
        is_near = (total - 1).abs() < near
        if functional.host_all(is_near):
            break
        low, high = torch.where(total < 1, log_a, low), torch.where(total >= 1, log_a, high)
        newton = log_a + ((1 - total + slope).clamp_min(0.0) / slope).log()
        bracketed = (newton >= low) & (newton <= high)
        log_a = torch.where(is_near, log_a, torch.where(bracketed, newton, (low + high) / 2))
    else:
        log_r, total, _ = _clip(log_p, log_q, gain, log_a)
    return log_r - total.log()


def _clip(log_p: Tensor, log_q: Tensor, gain: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ln of clip(q, a·p, a·p·e^gain) [R, V], its sum [R, 1], and the part of the sum proportional to a."""
    least = log_p + log_a
    log_r = log_q.clamp(least, least + gain)
    r = log_r.exp()
    return log_r, r.sum(-1, keepdim=True), r.masked_fill(log_r == log_q, 0.0).sum(-1, keepdim=True)


@functional.replaceable
def not_above_p(log_r: Tensor, p: Tensor, where: Tensor) -> Tensor:
    """Return ln of r with at most p at tokens ``where``, and the excess distributed as p, [R, V] each.

    ``log_r``: ln r up to a constant.
    """
    r = log_r.softmax(-1)
    kept = torch.where(where, torch.minimum(r, p), r)
    return (kept + (r - kept).sum(-1, keepdim=True) * p).log()
