"""Who is above whom in a tree, and which slots its nodes see, in Triton: one launch each. torch takes ten or twenty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _ancestors(PARENTS, OUT, count, BLOCK: tl.constexpr):
    node, column = tl.program_id(0) % count, tl.arange(0, BLOCK)
    parents = PARENTS + tl.program_id(0) // count * count
    found, above = column == node, tl.load(parents + node)
    while above > 0:
        found = found | (column == above)
        above = tl.load(parents + above)
    found = found | (column == 0)
    tl.store(OUT + tl.program_id(0).to(tl.int64) * count + column, found.to(tl.uint8), mask=column < count)


def ancestors(parents: Tensor) -> Tensor:
    """Return :func:`fsd_core.functional.ancestors`: [B, N, N] bool of parents [B, N]."""
    batch, count = parents.shape
    out = torch.empty(batch, count, count, dtype=torch.bool, device=parents.device)
    _ancestors[(batch * count,)](
        parents.contiguous(),
        out.view(torch.uint8),
        count,
        BLOCK=max(16, triton.next_power_of_2(count)),
        num_warps=1,
    )
    return out


@triton.jit
def _slot_masks(LENGTHS, AFTER, OUT, count, extra, used, BLOCK: tl.constexpr):
    row, slot = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = slot - tl.load(LENGTHS + row // count)
    after = tl.load(AFTER + row * extra + place, mask=(place >= 0) & (place < extra), other=0)
    tl.store(OUT + row * used + slot, tl.where(place < 0, 1, after).to(tl.uint8), mask=slot < used)


def slot_masks(lengths: Tensor, visible_after: Tensor, used: int) -> Tensor:
    """Return :func:`fsd_core.functional.slot_masks`: [B, M, S] bool of lengths [B] and [B, M, E] bool."""
    batch, count, extra = visible_after.shape
    out = torch.empty(batch, count, used, dtype=torch.bool, device=lengths.device)
    _slot_masks[batch * count, triton.cdiv(used, 1024)](
        lengths.contiguous(), visible_after.contiguous().view(torch.uint8), out.view(torch.uint8), count, extra, used,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out
