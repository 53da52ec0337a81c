"""What rules compute of a tree's nodes, in Triton, in one launch each: torch takes twenty to eighty."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_core.sampling import TINY
from fsd_infer.backends.cuda.kernels import VARYING

_TINY = tl.constexpr(TINY)


@triton.jit
def _above(TOKENS, PARENTS, TEXT, node, place):
    """The token at a node of a path, or at a place of the text before the root; and the node and place before it."""
    is_node = node >= 0
    token = tl.load(TOKENS + node, mask=is_node, other=-1)
    token = tl.where(is_node, token, tl.load(TEXT + place, mask=tl.where(is_node, -1, place) >= 0, other=-1))
    before = tl.where(node > 0, tl.load(PARENTS + node, mask=is_node, other=0), -1)  # the root is the text's last token
    return token, before, tl.where(is_node, place, place - 1)


@triton.jit(do_not_specialize=VARYING)
def _repeats(TOKENS, PARENTS, TEXTS, LENGTHS, OUT, count, width, N: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the N tokens that end at a node are also found before it, in the text or on its path."""
    tree, node = tl.program_id(0).to(tl.int64) // count, tl.program_id(0).to(tl.int64) % count
    TOKENS, PARENTS, TEXT = TOKENS + tree * count, PARENTS + tree * count, TEXTS + tree * width
    length = tl.load(LENGTHS + tree)
    repeats, ends = node < 0, tl.zeros([BLOCK], tl.int32)
    above = tl.load(PARENTS + node)
    while above > 0:  # nodes of the path below the root
        same = above > 0
        own, own_place, other, other_place = node, length - 2, above, length - 2
        for _ in tl.static_range(N):
            token, own, own_place = _above(TOKENS, PARENTS, TEXT, own, own_place)
            earlier, other, other_place = _above(TOKENS, PARENTS, TEXT, other, other_place)
            same = same & (token == earlier)
        repeats = repeats | same
        above = tl.load(PARENTS + above)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = (place >= N - 1) & (place < length)
        own, own_place = node, length - 2
        for back in tl.static_range(N):
            token, own, own_place = _above(TOKENS, PARENTS, TEXT, own, own_place)
            same = same & (tl.load(TEXT + place - back, mask=same, other=-1) == token)
        ends += same.to(tl.int32)
    repeats = (repeats | (tl.sum(ends, 0) > 0)) & (node > 0)
    tl.store(OUT + tl.program_id(0), repeats.to(tl.uint8))


def completes_ngram(tokens: Tensor, texts: Any, tree: Any, n: int) -> Tensor:
    """Return :func:`fsd_infer.rules.texts.completes_ngram`: [B, N] bool."""
    out, text = torch.empty(tokens.shape, dtype=torch.bool, device=tokens.device), texts.tokens
    text = text if text.stride(1) == 1 else text.contiguous()
    _repeats[(tokens.numel(),)](
        tokens.contiguous(), tree.parents.contiguous(), text, texts.lengths.contiguous(), out.view(torch.uint8),
        tokens.shape[1], text.stride(0), N=n, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=VARYING)
def _repeating(ROWS, NODES, TOKENS, PARENTS, TEXTS, LENGTHS, COLUMNS, OUT, count, text_width, width,
               REDUCED: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Note the tokens after each earlier place where the N - 1 tokens that end at a node are found."""
    context = tl.program_id(0).to(tl.int64)
    tree, node = tl.load(ROWS + context), tl.load(NODES + context)
    TOKENS, PARENTS, TEXT = TOKENS + tree * count, PARENTS + tree * count, TEXTS + tree * text_width
    length, out, above = tl.load(LENGTHS + tree), OUT + context * width, node
    while above > 0:  # nodes of the path below the root
        same, column = above > 0, tl.load(TOKENS + above)
        own, own_place, other, other_place = node, length - 2, tl.load(PARENTS + above), length - 2
        for _ in tl.static_range(1, N):
            token, own, own_place = _above(TOKENS, PARENTS, TEXT, own, own_place)
            earlier, other, other_place = _above(TOKENS, PARENTS, TEXT, other, other_place)
            same = same & (token == earlier)
        if REDUCED:
            column = tl.load(COLUMNS + column)
        tl.store(out + column, 1, mask=tl.where(same, column, -1) >= 0)
        above = tl.load(PARENTS + above)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = (place >= N - 1) & (place < length)
        own, own_place = node, length - 2
        for back in tl.static_range(1, N):
            token, own, own_place = _above(TOKENS, PARENTS, TEXT, own, own_place)
            same = same & (tl.load(TEXT + place - back, mask=same, other=-1) == token)
        column = tl.load(TEXT + place, mask=same, other=-1)
        if REDUCED:
            column = tl.load(COLUMNS + column, mask=same, other=-1)
        tl.store(out + column, 1, mask=same & (column >= 0))


def repeating_tokens(
    rows: Tensor, nodes: Tensor, texts: Any, tree: Any, n: int, width: int, columns: Tensor | None = None
) -> Tensor:
    """Return :func:`fsd_infer.rules.texts.repeating_tokens`: [R, width] bool."""
    out, text = torch.zeros(len(rows), width, dtype=torch.bool, device=rows.device), texts.tokens
    text = text if text.stride(1) == 1 else text.contiguous()
    tensors = [x.contiguous() for x in (rows, nodes, tree.tokens, tree.parents)]
    _repeating[(len(rows),)](
        *tensors, text, texts.lengths.contiguous(), tensors[0] if columns is None else columns, out.view(torch.uint8),
        tree.tokens.shape[1], text.stride(0), width, REDUCED=columns is not None, N=n, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _over_children(is_child, values):
    """Sum values [N] of drafts over each node's children."""
    return tl.sum(tl.where(is_child, values[None, :], 0.0), 1)


@triton.jit
def _any_child(is_child, holds):
    return tl.max((is_child & holds[None, :]).to(tl.int32), 1) > 0


@triton.jit(do_not_specialize=VARYING)
def _biased(BIAS, GAP, LOG_P, PARENTS, SCORES, APPLIES, OUT_APPLIES, OUT_R, OUT_COST, count, BLOCK: tl.constexpr):
    """See biased_sampled in fsd_infer/rules/distributions.py."""
    node, least = tl.arange(0, BLOCK), -float("inf")
    at, known = tl.program_id(0).to(tl.int64) * count + node, node < count
    parent = tl.load(PARENTS + at, mask=known, other=0).to(tl.int32)
    is_draft = known & (node > 0) & (tl.load(SCORES + at, mask=known, other=least) != least)
    is_child = (parent[None, :] == node[:, None]) & is_draft[None, :]
    log_p = tl.load(LOG_P + at, mask=known, other=least).to(tl.float64)
    bias = tl.load(BIAS + at, mask=known, other=0.0).to(tl.float64)
    bias = tl.where(tl.load(GAP + at, mask=known, other=0.0) == float("inf"), 0.0, bias)
    keeps_p, is_forced, p = bias == least, bias == float("inf"), tl.exp(log_p)
    restricted = _any_child(is_child, is_forced)
    among_forced = tl.gather(restricted.to(tl.int32), parent, 0) > 0
    log_r = log_p + tl.where(among_forced, tl.where(is_forced, 0.0, least), bias)
    of_children = tl.where(is_child, log_r[None, :], least)
    most = tl.max(of_children, 1)
    shift = tl.where(most == least, 0.0, most)
    drafted = shift + tl.log(tl.sum(tl.exp(of_children - shift[:, None]), 1))
    undrafted = tl.log(tl.maximum(1.0 - tl.minimum(_over_children(is_child, p), 1.0), 0.0))
    undrafted = tl.where(restricted, least, undrafted)
    left = tl.log(tl.maximum(1.0 - _over_children(is_child, tl.where(keeps_p, p, 0.0)), 0.0))
    high = tl.maximum(drafted, undrafted)
    high = tl.where(high == least, 0.0, high)
    log_scale = left - (high + tl.log(tl.exp(drafted - high) + tl.exp(undrafted - high)))
    log_r = tl.where(keeps_p, log_p, log_r + tl.gather(log_scale, parent, 0))
    r = tl.exp(log_r)
    cost = tl.where(undrafted == least, 0.0, tl.exp(undrafted + log_scale) * log_scale)
    cost = tl.maximum(cost + _over_children(is_child, tl.where(r == 0, 0.0, r * (log_r - log_p))), 0.0)
    applies = (tl.load(APPLIES + at, mask=known, other=0) != 0) & _any_child(is_child, bias > 0)
    tl.store(OUT_APPLIES + at, (applies & (tl.abs(log_scale) < float("inf"))).to(tl.uint8), mask=known)
    tl.store(OUT_R + at, r, mask=known)
    tl.store(OUT_COST + at, cost, mask=known)


def biased_sampled(logit_bias: Tensor, inputs: Any, applies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`fsd_infer.rules.distributions.biased_sampled`: [B, N] each."""
    tree, block = inputs.tree, max(16, triton.next_power_of_2(logit_bias.shape[1]))
    r, cost = torch.empty(2, *logit_bias.shape, dtype=torch.double, device=logit_bias.device)
    out = torch.empty_like(r, dtype=torch.bool)
    tensors = [
        x.contiguous() for x in (logit_bias, inputs.logprob_gap, inputs.log_p, tree.parents, tree.scores, applies)
    ]
    _biased[(len(r),)](
        *tensors[:5], tensors[5].view(torch.uint8), out.view(torch.uint8), r, cost, logit_bias.shape[1], BLOCK=block,
        num_warps=block // 8,
    )  # fmt: skip
    return out, r, cost


@triton.jit(do_not_specialize=VARYING)
def _tilt(GAP, LOG_P, COEF, IS_NEW, ELIGIBLE, LOSSY, CHOSEN, ANCESTORS, PARENTS, SCORES, OUT, count, cost,
          GREEDY: tl.constexpr, RESTRICTED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """See tilted_bias in fsd_infer/rules/tilted.py: sums over paths from [n] down to [m] are a matrix [m, n]."""
    tree, node, least = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), -float("inf")
    at, known = tree * count + node, node < count
    parent = tl.load(PARENTS + at, mask=known, other=0).to(tl.int32)
    is_draft = known & (node > 0) & (tl.load(SCORES + at, mask=known, other=least) != least)
    is_child = (parent[None, :] == node[:, None]) & is_draft[None, :]
    both = known[:, None] & known[None, :]
    is_path = tl.load(ANCESTORS + at[:, None] * count + node[None, :], mask=both, other=0) != 0
    coef = tl.load(COEF + tree)
    is_new = tl.load(IS_NEW + at, mask=known, other=0) != 0
    eligible = tl.load(ELIGIBLE + at, mask=known, other=0) != 0
    if GREEDY:
        gap = tl.load(GAP + at, mask=known, other=float("inf"))
        chosen = tl.load(CHOSEN + at, mask=known, other=0) != 0
        repeated = known & (is_new == 0) & (gap == 0)
        closed = tl.gather(_any_child(is_child, repeated).to(tl.int32), parent, 0) > 0
        is_open = (eligible & (closed == 0)) | repeated
        if RESTRICTED:
            lossy = tl.load(LOSSY + tree * count + parent, mask=known, other=0) != 0
            is_open = is_open & (lossy | chosen)
        own_cost = tl.where(chosen, 0.0, cost)
        gains, rest = is_new.to(tl.float64) - coef * gap - own_cost, node * 0.0
    else:
        is_open, log_p = eligible, tl.load(LOG_P + at, mask=known, other=least).to(tl.float64)
        gains = log_p + 1 / coef
        rest = 1.0 - _over_children(is_child, tl.where(eligible, tl.exp(log_p), 0.0))
        rest = tl.log(tl.maximum(rest, 0.0))
    sums = tl.sum(tl.where(is_path & is_open[None, :], gains[None, :], 0.0), 1)
    barred = tl.sum((is_path & (is_open == 0)[None, :]).to(tl.int32), 1)
    reached = is_path & (barred[:, None] == barred[None, :])
    sums = tl.where(reached, sums[:, None] - sums[None, :], least)
    if GREEDY:
        value = tl.max(sums, 0) - own_cost
    else:
        sums += rest[:, None]
        most = tl.max(sums, 0)
        most = tl.where(most == least, 0.0, most)
        value = coef * (most + tl.log(tl.sum(tl.exp(sums - most[None, :]), 0)))
    bias = tl.where(eligible, tl.maximum(1 + value, 0.0) / coef, 0.0)
    tl.store(OUT + at, bias, mask=known)


def tilted_bias(
    logprob_gap: Tensor, coef: Tensor, is_new: Tensor, eligible: Tensor, lossy: Tensor | None, cost: float, inputs: Any
) -> Tensor:
    """Return :func:`fsd_infer.rules.tilted.tilted_bias`: [B, N]."""
    tree, greedy, out = inputs.tree, inputs.greedy, torch.empty_like(logprob_gap, memory_format=torch.contiguous_format)
    chosen = inputs.accept_prob if greedy else eligible
    flags = [is_new, eligible, eligible if lossy is None else lossy, chosen, tree.ancestors]
    block = max(16, triton.next_power_of_2(out.shape[1]))
    _tilt[(len(out),)](
        logprob_gap.contiguous(), logprob_gap if greedy else inputs.log_p.contiguous(), coef.contiguous(),
        *(x.contiguous().view(torch.uint8) for x in flags), tree.parents.contiguous(), tree.scores.contiguous(), out,
        out.shape[1], float(cost), GREEDY=greedy, RESTRICTED=lossy is not None, BLOCK=block, num_warps=block // 8,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=VARYING)
def _under(R, LOG_R, RESIDUAL, LOG_Q, DRAWN, PARENTS, OUT, count, CHAIN: tl.constexpr, BLOCK: tl.constexpr):
    """See accept_prob_under in fsd_infer/rules/inputs.py."""
    node = tl.arange(0, BLOCK)
    first, known = tl.program_id(0).to(tl.int64) * count, node < count
    at, parent = first + node, tl.load(PARENTS + first + node, mask=known, other=-1)
    is_drawn = tl.load(DRAWN + at, mask=known, other=0) != 0
    r, log_q = tl.load(R + at, mask=known, other=0.0), tl.load(LOG_Q + at, mask=known, other=0.0)
    passes = tl.exp(tl.minimum(tl.load(LOG_R + at, mask=known, other=0.0) - log_q, 0.0).to(r.dtype))
    passes, fixed = tl.where(is_drawn, passes, 0.0), r
    if not CHAIN:
        siblings = (parent[:, None] == parent[None, :]) & is_drawn[None, :]
        residual = tl.load(RESIDUAL + first + parent, mask=known, other=1.0).to(r.dtype)
        rest = tl.maximum(r - tl.exp(log_q.to(r.dtype)), 0.0) / tl.maximum(residual, _TINY)
        fails = 1.0 - tl.sum(tl.where(siblings, passes[None, :], 0.0), 1)
        fixed = tl.where(tl.max(siblings.to(tl.int32), 1) > 0, fails * rest, r)
    fixed = fixed if CHAIN else tl.minimum(fixed, 1.0)
    tl.store(OUT + at, tl.where(is_drawn, passes, fixed), mask=known)


def accept_prob_under(r: Tensor, log_r: Tensor, residual: Tensor, inputs: Any) -> Tensor:
    """Return :func:`fsd_infer.rules.inputs.accept_prob_under`: [B, N]."""
    out, block = torch.empty_like(r, memory_format=torch.contiguous_format), max(16, triton.next_power_of_2(r.shape[1]))
    tensors = (r, log_r, residual, inputs.log_q, inputs.is_drawn.view(torch.uint8), inputs.tree.parents)
    _under[(len(r),)](
        *(x.contiguous() for x in tensors), out, r.shape[1], CHAIN=inputs.is_chain, BLOCK=block, num_warps=block // 16
    )
    return out
