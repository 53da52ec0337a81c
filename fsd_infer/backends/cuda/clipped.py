"""Dense distributions at contexts [R] in Triton: a program per row, which reads the row several times.

The search for a clipped one's constant is one launch, of which torch takes some thirty for each step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_core.sampling import TINY
from fsd_infer.backends.cuda.compare import KL_FLOOR, terms
from fsd_infer.backends.cuda.kernels import VARYING

_TINY = tl.constexpr(TINY)
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


@triton.jit
def _log_sum_exp(X, columns, BLOCK: tl.constexpr):
    """Largest number of a row and Σ e^(x - largest)."""
    most, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(X + ids, mask=ids < columns, other=-float("inf")).to(tl.float32))
    high = tl.max(most, 0)
    for start in range(0, columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        total += tl.exp(tl.load(X + ids, mask=ids < columns, other=-float("inf")).to(tl.float32) - high)
    return high, tl.sum(total, 0)


@triton.jit
def _emitted(LOG_R, SCORES, PROPOSAL, R, COST, RESIDUAL, columns, SAMPLED: tl.constexpr, BLOCK: tl.constexpr):
    """See emitted in fsd_infer/rules/walk.py."""
    row = tl.program_id(0).to(tl.int64)
    first = row * columns
    r_high, r_sum = _log_sum_exp(LOG_R + first, columns, BLOCK)
    p_high, p_sum = _log_sum_exp(SCORES + first, columns, BLOCK)
    r_total, p_total = r_high + tl.log(r_sum), p_high + tl.log(p_sum)
    cost, residual = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < columns
        log_r = tl.load(LOG_R + first + ids, mask=inside, other=-float("inf"))
        log_p = tl.load(SCORES + first + ids, mask=inside, other=-float("inf"))
        r = tl.exp(log_r - r_high) / r_sum
        tl.store(R + first + ids, r, mask=inside)
        a = tl.maximum(log_p - p_total, KL_FLOOR, propagate_nan=tl.PropagateNan.ALL)
        b = tl.maximum(log_r - r_total, KL_FLOOR, propagate_nan=tl.PropagateNan.ALL)
        cost += terms(a, b, 1.0, "kl_qp")
        if SAMPLED:
            residual += tl.maximum(r - tl.load(PROPOSAL + first + ids, mask=inside, other=0.0), 0.0)
    total = tl.sum(cost, 0)
    tl.store(COST + row, tl.where(total == total, tl.maximum(total, 0.0), total))
    if SAMPLED:
        tl.store(RESIDUAL + row, tl.sum(residual, 0))


def emitted(log_r: Tensor, at: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return :func:`fsd_infer.rules.walk.emitted` of ln r [R, V] in fp32."""
    log_r, scores, sampled = log_r.contiguous(), at.scores.contiguous(), at.inputs.sampled
    r, (cost, residual) = torch.empty_like(log_r), torch.empty(2, len(log_r), device=log_r.device)
    _emitted[(len(log_r),)](
        log_r, scores, at.proposal.contiguous() if sampled else scores, r, cost, residual, log_r.shape[1],
        SAMPLED=sampled, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return r, cost, residual if sampled else None


@triton.jit
def _not_above(LOG_R, P, WHERE, OUT, columns, BLOCK: tl.constexpr):
    """See not_above_p in fsd_infer/rules/optimal.py."""
    first = tl.program_id(0).to(tl.int64) * columns
    high, total = _log_sum_exp(LOG_R + first, columns, BLOCK)
    excess = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        ids = first + start + tl.arange(0, BLOCK)
        inside = ids < first + columns
        r = tl.exp(tl.load(LOG_R + ids, mask=inside, other=-float("inf")) - high) / total
        p = tl.load(P + ids, mask=inside & (tl.load(WHERE + ids, mask=inside, other=0) != 0), other=float("inf"))
        excess += tl.maximum(r - p, 0.0)
    left = tl.sum(excess, 0)
    for start in range(0, columns, BLOCK):
        ids = first + start + tl.arange(0, BLOCK)
        inside = ids < first + columns
        r = tl.exp(tl.load(LOG_R + ids, mask=inside, other=-float("inf")) - high) / total
        p = tl.load(P + ids, mask=inside, other=0.0)
        r = tl.where(tl.load(WHERE + ids, mask=inside, other=0) != 0, tl.minimum(r, p), r)
        tl.store(OUT + ids, tl.log(r + left * p), mask=inside)


def not_above_p(log_r: Tensor, p: Tensor, where: Tensor) -> Tensor:
    """Return :func:`fsd_infer.rules.optimal.not_above_p` of ln r and p [R, V] in fp32."""
    out = torch.empty_like(log_r, memory_format=torch.contiguous_format)
    inputs = log_r.contiguous(), p.contiguous(), where.contiguous().view(torch.uint8)
    _not_above[(len(log_r),)](*inputs, out, log_r.shape[1], BLOCK=_BLOCK, num_warps=8)
    return out


@triton.jit(do_not_specialize=VARYING)
def _of_drafts(R, P, SLOT, TOKENS, INDEX, LOG_P, OUT, width, nodes, BLOCK: tl.constexpr):
    """See reduced_drafts in fsd_infer/rules/vocab_rows.py."""
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = node < nodes
    start = tl.load(SLOT + node, mask=known, other=0) * width
    entry = tl.load(INDEX + tl.load(TOKENS + node, mask=known, other=0), mask=known, other=-1)
    own = tl.load(R + start + tl.where(entry < 0, width - 1, entry), mask=known, other=0.0)
    others = tl.maximum(tl.load(P + start + width - 1, mask=known, other=1.0), _TINY)
    share = own / others * tl.exp(tl.load(LOG_P + node, mask=known, other=0.0))
    tl.store(OUT + node, tl.where(entry < 0, share, own), mask=known)


def reduced_drafts(r: Tensor, slot: Tensor, at: Any) -> Tensor:
    """Return :func:`fsd_infer.rules.vocab_rows.reduced_drafts`: [B, N] of r [R, Vd + 1]."""
    inputs, out = at.inputs, torch.empty(slot.shape, device=r.device)
    given = (r, at.p, slot, inputs.tree.tokens, inputs.draft_index, inputs.log_p)
    _of_drafts[(triton.cdiv(slot.numel(), 64),)](
        *(x.contiguous() for x in given), out, r.shape[1], slot.numel(), BLOCK=64, num_warps=2
    )
    return out


@triton.jit(do_not_specialize=VARYING)
def _rows(P, TOTAL, Q, IDS, ROWS, NODES, Q_INDEX, DRAWS, FIXED, SCORES, PROPOSAL, IS_FIXED, count, columns, rows,
          drafted, width, SAMPLED: tl.constexpr, FIXES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A context's ln p, the q of its draw, and its fixed candidates, over the drafter's tokens and the rest."""
    context = tl.program_id(0).to(tl.int64)
    tree = tl.load(ROWS + context)
    at, out = tree * count + tl.load(NODES + context), context * (drafted + 1)
    total, sums = tl.load(TOTAL + at), tl.zeros([BLOCK], tl.float32)
    row = tl.load(Q_INDEX + at)
    q_row = tree * rows + tl.maximum(row, 0)
    draws = row < -1
    if SAMPLED:
        draws = (row >= 0) & (tl.load(DRAWS + at) != 0)
        high, q_sum = _log_sum_exp(Q + q_row * drafted, tl.where(draws, drafted, 1), BLOCK)
    for start in range(0, drafted, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < drafted
        token = tl.load(IDS + ids, mask=inside, other=0)
        log_p = tl.load(P + at * columns + token, mask=inside, other=-float("inf")).to(tl.float32) - total
        sums += tl.exp(log_p)
        tl.store(SCORES + out + ids, log_p, mask=inside)
        is_fixed = ids < 0
        if FIXES:
            for child in range(width):
                entry = tl.load(FIXED + q_row * width + child)
                is_fixed = is_fixed | ((ids == entry) & (row >= 0))
        tl.store(IS_FIXED + out + ids, is_fixed.to(tl.uint8), mask=inside)
        if SAMPLED:
            q = tl.load(Q + q_row * drafted + ids, mask=inside & draws, other=-float("inf")).to(tl.float32)
            tl.store(PROPOSAL + out + ids, tl.where(draws, tl.exp(q - high) / q_sum, 0.0), mask=inside)
    tl.store(SCORES + out + drafted, tl.log(tl.maximum(1.0 - tl.sum(sums, 0), 0.0)))
    tl.store(IS_FIXED + out + drafted, tl.zeros([], tl.uint8))
    if SAMPLED:
        tl.store(PROPOSAL + out + drafted, 0.0)


def reduced_rows(scores: Tensor, at: Any) -> dict[str, Tensor]:
    """Return :func:`fsd_infer.rules.vocab_rows.reduced_rows`."""
    inputs, tree = at.inputs, at.inputs.tree
    (_, count, columns), drafted, contexts = scores.shape, len(tree.draft_ids), len(at.rows)
    log_p, proposal = torch.empty(2, contexts, drafted + 1, device=scores.device)
    fixed = torch.empty(contexts, drafted + 1, dtype=torch.bool, device=scores.device)
    numbers = [x.contiguous() for x in (tree.draft_ids, at.rows, at.nodes, tree.q_index)]
    q, draws = (tree.q_scores, inputs.has_drawn_child) if inputs.sampled else (log_p, fixed)
    candidates = numbers[3] if tree.fixed is None else tree.fixed.contiguous()
    _rows[(contexts,)](
        scores.contiguous(), inputs.log_total.contiguous(), q.contiguous(), *numbers,
        draws.contiguous().view(torch.uint8), candidates, log_p, proposal, fixed.view(torch.uint8),
        count, columns, tree.q_logits.shape[1], drafted, candidates.shape[-1],
        SAMPLED=inputs.sampled, FIXES=tree.fixed is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return {"scores": log_p, "fixed": fixed} | ({"proposal": proposal} if inputs.sampled else {})
