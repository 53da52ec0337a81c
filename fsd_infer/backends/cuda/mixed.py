"""Which children are fixed and which contexts draw one, above temperature 0, in Triton: torch takes fifty launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_core.sampling import ACCEPT_IF_SURE, ACCEPT_IF_UNSURE, MIN_REST, MixedChildren
from fsd_infer.backends.cuda.kernels import VARYING, chunks_of, topk_logprobs


@triton.jit(do_not_specialize=VARYING)
def _mix(LOG_Q, ENTRIES, ACCEPT, ANCESTORS, RESERVED, FREE, OUT_LOG_Q, OUT_DRAWN, OUT_FIXED, OUT_RESERVED, OUT_FREE,
         count, width, above, likely_ratio, drawn_ratio, min_log_prob, UNSURE: tl.constexpr, SURE: tl.constexpr,
         LEAST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr):  # fmt: skip
    """Contexts [E] of a tree, with children [w] each, below expanded nodes [n]."""
    tree = tl.program_id(0).to(tl.int64)
    context, child, node = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_A)
    known, is_last = context < count, (child == width - 1)[None, :]
    at, inside = (tree * count + context)[:, None] * width + child[None, :], known[:, None] & (child < width)[None, :]
    log_q = tl.load(LOG_Q + at, mask=inside, other=-float("inf"))
    accept = tl.load(ACCEPT + tree * count + context, mask=known, other=-float("inf"))
    accept_drawn = tl.minimum(drawn_ratio * (UNSURE + (SURE - UNSURE) * tl.exp(tl.max(log_q, 1))), SURE)
    gain = tl.log(tl.maximum(likely_ratio - accept_drawn, 0.0))
    is_fixed = inside & (accept[:, None] + log_q + gain[:, None] >= min_log_prob) & (child < width - 1)[None, :]
    rest = tl.maximum(1.0 - tl.sum(tl.where(is_fixed, tl.exp(log_q), 0.0), 1), 0.0)
    drawn_log_q = tl.log(accept_drawn * rest)
    wants = known & (accept + drawn_log_q >= min_log_prob) & (rest > LEAST)
    on_path = tl.load(ANCESTORS + (tree * count + context)[:, None] * above + node[None, :],
                      mask=known[:, None] & (node < above)[None, :], other=0) != 0  # fmt: skip
    reserved = tl.load(RESERVED + tree * above + node, mask=node < above, other=0) != 0
    cost = tl.where(wants, 1 + tl.sum((on_path & ~reserved[None, :]).to(tl.int32), 1), 0)
    free = tl.load(FREE + tree)
    draws = wants & (tl.cumsum(cost, 0) <= free)
    reserved = reserved | (tl.max((on_path & draws[:, None]).to(tl.int32), 0) > 0)
    is_drawn = is_last & draws[:, None]
    log_q = tl.where(is_drawn, drawn_log_q[:, None], tl.where(draws[:, None] & ~is_fixed, -float("inf"), log_q))
    entries = tl.load(ENTRIES + at, mask=inside, other=0)
    tl.store(OUT_LOG_Q + at, log_q, mask=inside)
    tl.store(OUT_DRAWN + at, is_drawn.to(tl.uint8), mask=inside)
    tl.store(OUT_FIXED + at, tl.where(is_fixed, entries, -1), mask=inside)
    tl.store(OUT_RESERVED + tree * above + node, reserved.to(tl.uint8), mask=node < above)
    tl.store(OUT_FREE + tree, free - tl.sum(tl.where(draws, cost, 0), 0))


@triton.jit
def _without(X, FIXED, OUT, columns, width, stride, BLOCK: tl.constexpr):
    """Copy a part of a row of scores, -inf at the fixed children's entries."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + ids, mask=ids < columns, other=0.0).to(tl.float32)
    for child in range(width):
        x = tl.where(ids == tl.load(FIXED + row * width + child), -float("inf"), x)
    tl.store(OUT + row * columns + ids, x, mask=ids < columns)


def mixed_children(
    scores: Tensor,
    width: int,
    accept_log_probs: Tensor,
    ancestors: Tensor,
    reserved: Tensor,
    free_nodes: Tensor,
    ratios: tuple[float, float],
    min_log_prob: float,
) -> MixedChildren:
    """Return :func:`fsd_core.sampling.mixed_children`."""
    (batch, count, columns), above = scores.shape, ancestors.shape[-1]
    likeliest, entries = topk_logprobs(scores, width)
    log_q, fixed, drawn = (
        torch.empty_like(likeliest),
        torch.empty_like(entries),
        torch.empty_like(entries, dtype=torch.bool),
    )
    outside = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    left = torch.empty_like(free_nodes, memory_format=torch.contiguous_format)
    now_reserved = torch.empty(reserved.shape, dtype=torch.bool, device=reserved.device)
    bytes_of = [x.contiguous().view(torch.uint8) for x in (ancestors, reserved)]
    _mix[(batch,)](
        likeliest, entries, accept_log_probs.contiguous(), *bytes_of, free_nodes.contiguous(), log_q,
        drawn.view(torch.uint8), fixed, now_reserved.view(torch.uint8), left, count, width, above, *ratios,
        min_log_prob, UNSURE=ACCEPT_IF_UNSURE, SURE=ACCEPT_IF_SURE, LEAST=MIN_REST,
        BLOCK_E=triton.next_power_of_2(count), BLOCK_W=triton.next_power_of_2(width),
        BLOCK_A=triton.next_power_of_2(max(above, 1)), num_warps=4,
    )  # fmt: skip
    flat = scores.reshape(-1, columns)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block, chunks = chunks_of(columns)
    _without[len(flat), chunks](flat, fixed, outside, columns, width, flat.stride(0), BLOCK=block, num_warps=4)
    return MixedChildren(log_q, entries, drawn, fixed, outside, now_reserved, left)
