"""Weights rounded to a few bits by least squares, for drafters that are copies of their target.

In groups of 64 of an output's inputs, w ≈ z + s·n with whole n from 0 to 2^bits - 1. Scale s and zero z minimise a
group's squared error. From several starts (the range, shrunk by several factors), two steps alternate: rounding
n = round((w - z)/s), and linear regression of w on n. The best result wins. HQQ (half-quadratic quantization)
alternates likewise but minimises another norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 64
SHRINKING = (1.0, 0.9, 0.8, 0.7, 0.6)
TURNS = 4
_AT_ONCE = 2**19  # numbers per block, to fit a CPU's cache


def round_weight(weight: Tensor, bits: int) -> Tensor:
    """Return the weight [..., in] with each group of inputs rounded to 2^bits values, in the same dtype."""
    width = weight.shape[-1]
    group = math.gcd(width, GROUP)
    groups = weight.reshape(-1, group if group >= GROUP // 4 else width)
    rounded = torch.empty_like(groups)
    for part, out in zip(
        *(whole.split(max(_AT_ONCE // groups.shape[1], 1)) for whole in (groups, rounded)), strict=True
    ):
        out.copy_(_rounded(part.float(), 2**bits - 1))
    return rounded.view(weight.shape)


def _rounded(groups: Tensor, most: int) -> Tensor:
    """Round [G, n] in fp32, with n from 0 to ``most``."""
    low, high = (end[:, None] for end in groups.aminmax(dim=1))
    mean, least = groups.mean(1, keepdim=True), torch.finfo(torch.float32).tiny
    best, least_error = groups, torch.full_like(mean, math.inf)
    for shrunk in SHRINKING:
        zero = (low + high) / 2 - shrunk * (high - low) / 2
        scale = (shrunk * (high - low) / most).clamp_min(least)
        for _ in range(TURNS):
            numbers = ((groups - zero) / scale).round_().clamp_(0, most)
            centre = numbers.mean(1, keepdim=True)
            deviations = numbers - centre
            spread = deviations.square().sum(1, keepdim=True)
            slope = (deviations * (groups - mean)).sum(1, keepdim=True) / spread.clamp_min(least)
            scale = torch.where(spread > 0, slope, scale).clamp_min(least)
            zero = mean - scale * centre
        rounded = numbers * scale + zero
        error = (rounded - groups).square().sum(1, keepdim=True)
        best = torch.where(error < least_error, rounded, best)
        least_error = torch.minimum(least_error, error)
    return best
