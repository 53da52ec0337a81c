"""The search for a clipped distribution's constant in Triton, in one launch: torch takes some thirty for each step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens that a program reads at once


@triton.jit
def _log_r(P, Q, GAIN, log_a, ids, inside):
    """ln of clip(q, a·p, a·p·e^gain), and ln q, at some tokens; -inf beyond the vocabulary."""
    log_q = tl.load(Q + ids, mask=inside, other=-float("inf"))
    least = tl.load(P + ids, mask=inside, other=-float("inf")) + log_a
    return tl.minimum(tl.maximum(log_q, least), least + tl.load(GAIN + ids, mask=inside, other=0.0)), log_q


@triton.jit
def _sums(P, Q, GAIN, log_a, columns, BLOCK: tl.constexpr):
    """Σ r, and the part of it that is proportional to a."""
    total, slope = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        log_r, log_q = _log_r(P, Q, GAIN, log_a, ids, ids < columns)
        r = tl.exp(log_r)
        total += r
        slope += tl.where(log_r == log_q, 0.0, r)
    return tl.sum(total, 0), tl.sum(slope, 0)


@triton.jit
def _clipped(P, Q, GAIN, OUT, columns, steps, near, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * columns
    P, Q, GAIN = P + first, Q + first, GAIN + first
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(GAIN + ids, mask=ids < columns, other=0.0))
    low, log_a = -tl.max(most, 0), 0.0
    high = log_a
    total, slope = _sums(P, Q, GAIN, log_a, columns, BLOCK)
    step = 0
    while (step < steps) & (tl.abs(total - 1) >= near):
        low, high = tl.where(total < 1, log_a, low), tl.where(total < 1, high, log_a)
        newton = log_a + tl.log(tl.maximum(1 - total + slope, 0.0) / slope)
        log_a = tl.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
        total, slope = _sums(P, Q, GAIN, log_a, columns, BLOCK)
        step += 1
    for start in range(0, columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        log_r, log_q = _log_r(P, Q, GAIN, log_a, ids, ids < columns)
        tl.store(OUT + first + ids, log_r - tl.log(total), mask=ids < columns)


def search_clipped(log_p: Tensor, log_q: Tensor, gain: Tensor, steps: int, near: float) -> Tensor:
    """Return :func:`fsd_infer.rules.optimal.search_clipped` of tensors [R, V] in fp32.

    A row ends as soon as its sum is ``near`` 1, or after so many steps.
    """
    out = torch.empty_like(log_p, memory_format=torch.contiguous_format)
    inputs = (x.contiguous() for x in (log_p, log_q, gain))
    _clipped[(len(log_p),)](*inputs, out, log_p.shape[1], steps, near, BLOCK=_BLOCK, num_warps=8)
    return out
