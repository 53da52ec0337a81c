"""Who is above whom in a tree, which slots its nodes see, and parts of trees, in Triton: one launch each.

torch takes ten or twenty.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_infer.backends.cuda.kernels import VARYING


@triton.jit(do_not_specialize=VARYING)
def _ancestors(PARENTS, OUT, count, BLOCK: tl.constexpr):
    node, column = tl.program_id(0) % count, tl.arange(0, BLOCK)
    parents = PARENTS + tl.program_id(0) // count * count
    on_path, above = column == node, tl.load(parents + node)
    while above > 0:
        on_path = on_path | (column == above)
        above = tl.load(parents + above)
    on_path = on_path | (column == 0)
    tl.store(OUT + tl.program_id(0).to(tl.int64) * count + column, on_path.to(tl.uint8), mask=column < count)


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


@triton.jit(do_not_specialize=VARYING)
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


@triton.jit(do_not_specialize=VARYING)
def _keep_nodes(TOKENS, PARENTS, SCORES, Q_INDEX, PROPOSERS, DRAWN, NODES, OUT_TOKENS, OUT_PARENTS, OUT_SCORES,
                OUT_Q_INDEX, OUT_PROPOSERS, OUT_DRAWN, IS_DRAFT, IS_CHILD, count, most,
                PROPOSED: tl.constexpr, DRAWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A tree's fields at some nodes, and the numbers of their parents among these."""
    tree, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    out, known = tree * most + place, place < most
    node = tl.load(NODES + out, mask=known, other=-1)
    at = tree * count + node
    parent = tl.load(PARENTS + at, mask=known, other=-2)
    parent = tl.max(tl.where(parent[:, None] == node[None, :], place[None, :], 0), 1)  # 0 for other nodes
    score = tl.load(SCORES + at, mask=known, other=-float("inf"))
    is_draft = known & (place > 0) & (score != -float("inf"))
    is_child = (parent[None, :] == place[:, None]) & is_draft[None, :]
    row = tl.where(tl.max(is_child.to(tl.int32), 1) > 0, tl.load(Q_INDEX + at, mask=known, other=-1), -1)
    tl.store(OUT_TOKENS + out, tl.load(TOKENS + at, mask=known, other=0), mask=known)
    tl.store(OUT_PARENTS + out, parent.to(tl.int64), mask=known)
    root = tl.load(SCORES + tree * count + tl.load(NODES + tree * most))
    tl.store(OUT_SCORES + out, score - root, mask=known)
    tl.store(OUT_Q_INDEX + out, row, mask=known)
    if PROPOSED:
        tl.store(OUT_PROPOSERS + out, tl.load(PROPOSERS + at, mask=known, other=0), mask=known)
    if DRAWS:
        tl.store(OUT_DRAWN + out, tl.load(DRAWN + at, mask=known, other=0), mask=known)
    tl.store(IS_DRAFT + out, is_draft.to(tl.uint8), mask=known)
    child = IS_CHILD + out[:, None] * most + place[None, :]
    tl.store(child, is_child.to(tl.uint8), mask=known[:, None] & known[None, :])


def keep_nodes(
    tokens: Tensor,
    parents: Tensor,
    scores: Tensor,
    q_index: Tensor,
    proposers: Tensor | None,
    drawn: Tensor | None,
    nodes: Tensor,
) -> tuple[Any, ...]:
    """Return :func:`fsd_core.functional.keep_nodes` of fields [B, N] and nodes [B, K]."""
    fields = [None if x is None else x.contiguous() for x in (tokens, parents, scores, q_index, proposers, drawn)]
    out = [None if x is None else torch.empty(nodes.shape, dtype=x.dtype, device=x.device) for x in fields]
    is_draft = torch.empty(nodes.shape, dtype=torch.bool, device=nodes.device)
    is_child = is_draft.new_empty(*nodes.shape, nodes.shape[1])
    inputs = [tokens if x is None else x.view(torch.uint8) if x.dtype == torch.bool else x for x in (*fields, *out)]
    block = max(16, triton.next_power_of_2(nodes.shape[1]))
    _keep_nodes[(len(nodes),)](
        *inputs[:6], nodes.contiguous(), *inputs[6:], is_draft.view(torch.uint8), is_child.view(torch.uint8),
        tokens.shape[1], nodes.shape[1], PROPOSED=proposers is not None, DRAWS=drawn is not None,
        BLOCK=block, num_warps=block // 16,
    )  # fmt: skip
    return (*out, (is_draft, is_child))
