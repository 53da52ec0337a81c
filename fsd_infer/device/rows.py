"""Batch rows of different lengths: padding, picking nodes, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device, wide


def padded(rows: Sequence[Sequence[Any]], fill: float = 0) -> Tensor:
    """Pad rows at their ends to [B, N], on the CPU."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (most - len(row))] for row in rows])


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Pick values [B, N, ...] at nodes [B, K] -> [B, K, ...]. Copies whole entries, unlike gather."""
    if len(values) == 1:
        return values[0].index_select(0, nodes[0])[None]
    count = values.shape[1]
    index = nodes + count * torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    return values.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, nodes.shape)


def visible_slots(lengths: Tensor, sees: Tensor) -> Tensor:
    """Return which cache slots new tokens may attend to: the whole text, and chosen slots after it.

    Args:
        lengths: [B] text length of each row, on the CPU; the text occupies slots 0 to length - 1.
        sees: [B, M, E] bool; whether token i may attend to the e-th slot after the text.

    Returns:
        [B, M, S] bool on the device of ``sees``, with S = longest text + E.
    """
    if lengths.shape[0] == 1:  # no offsets between rows
        return torch.nn.functional.pad(sees, (int(lengths), 0), value=True)
    extra = sees.shape[-1]
    offset = to_device(torch.arange(int(lengths.max()) + extra) - lengths[:, None], sees.device)  # [B, S]
    index = offset.clamp(0, max(extra - 1, 0))[:, None].expand(-1, sees.shape[1], -1)
    inside = (offset >= 0) & (offset < extra)
    return torch.where(inside[:, None], sees.gather(2, index) if extra else inside[:, None], (offset < 0)[:, None])


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (True: visible) to the term that eager attention adds: 0, or the least ``dtype`` value."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index per row by inverse CDF; an index of weight 0 is never drawn.

    Args:
        weights: [R, M], at least 0, of any total; a total of 0 gives M.
        uniforms: [R] in [0, 1).
    """
    cdf = weights.cumsum(-1, dtype=wide(weights.device))
    total = cdf[:, -1]
    share = torch.minimum(uniforms.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, share[:, None], right=True).squeeze(-1)
