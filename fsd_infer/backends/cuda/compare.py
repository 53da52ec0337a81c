"""Divergences of distributions q from p, and what weighted ones leave, in Triton: a pass over the logits of both.

Programs take chunks of q's tokens. For tokens that q does not have its probability is 0, and terms are linear in p.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_core.divergence import LN2, ZERO
from fsd_infer.backends.cuda.kernels import VARYING, chunks_of, row_pass

RESIDUAL = "residual"  # Σ (w·p - q)+, beside the names of divergences
OUTSIDE = {"kl_qp": 0.0, "js": LN2 / 2, "tv": 0.5, RESIDUAL: 1.0}  # a token's term per p where q is 0
KINDS = (*OUTSIDE, "kl_pq", "ag")
_MOST = {"js": LN2, "tv": 1.0, RESIDUAL: 1.0}
KL_FLOOR, _LN2 = tl.constexpr(ZERO), tl.constexpr(LN2)


@triton.jit
def terms(a, b, weight, KIND: tl.constexpr):
    """The terms of tokens with ln p = a and ln q = b, both at least ZERO."""
    p, q, gap = tl.exp(a), tl.exp(b), b - a
    no_p, no_q = a <= KL_FLOOR, b <= KL_FLOOR
    if KIND == "residual":
        return tl.maximum(weight * p - q, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "tv":
        return 0.5 * tl.abs(p - q)
    elif KIND == "kl_qp":
        return tl.where(no_p & (b > KL_FLOOR), float("inf"), q * gap)
    elif KIND == "kl_pq":
        return tl.where(no_q & (a > KL_FLOOR), float("inf"), -p * gap)
    else:
        rest = tl.log(1.0 + tl.exp(-tl.abs(gap)))
        up, down = tl.maximum(gap, 0.0) + rest, tl.maximum(-gap, 0.0) + rest  # softplus(±gap)
        if KIND == "js":
            return tl.where(gap == 0, 0.0, 0.5 * (p * (_LN2 - up) + q * (_LN2 - down)))
        else:
            value = tl.where(no_p != no_q, float("inf"), 0.25 * (p + q) * (up + down - 2 * _LN2))
            return tl.where(gap == 0, 0.0, value)


@triton.jit(do_not_specialize=VARYING)
def _compare(P, P_TOTAL, Q, Q_TOTAL, IDS, Q_INDEX, WEIGHT, PARTS, count, columns, rows, drafted, chunks,
             KIND: tl.constexpr, INDEXED: tl.constexpr, REDUCED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A chunk of q's tokens in a row of p: the sum of the terms, and of w·p."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, weight = node, 1.0
    if INDEXED:
        row = tl.load(Q_INDEX + node)
        if row < 0:
            return
        row += node // count * rows
    if KIND == "residual":
        weight = tl.load(WEIGHT + node).to(tl.float32)
    entry = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = entry < drafted
    token = entry
    if REDUCED:
        token = tl.load(IDS + entry, mask=inside, other=0)
    p = tl.load(P + node * columns + token, mask=inside, other=-float("inf")).to(tl.float32)
    q = tl.load(Q + row * drafted + entry, mask=inside, other=-float("inf")).to(tl.float32)
    a = tl.maximum(p - tl.load(P_TOTAL + 2 * node), KL_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    b = tl.maximum(q - tl.load(Q_TOTAL + 2 * row), KL_FLOOR, propagate_nan=tl.PropagateNan.ALL)
    part = PARTS + 2 * (node * chunks + chunk)
    tl.store(part, tl.sum(terms(a, b, weight, KIND), 0))
    tl.store(part + 1, tl.sum(weight * tl.exp(a), 0))


@triton.jit
def _sum(PARTS, Q_INDEX, WEIGHT, OUT, chunks, outside, most, otherwise,
         INDEXED: tl.constexpr, WEIGHTED: tl.constexpr, REDUCED: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Join a row's chunks and the tokens that q does not have; ``otherwise`` where there is no q."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    out = OUT + row
    if INDEXED:
        if tl.load(Q_INDEX + row) < 0:
            tl.store(out, otherwise)
            return
    part, weight = PARTS + 2 * (row * chunks + chunk), 1.0
    if WEIGHTED:
        weight = tl.load(WEIGHT + row)
    total = tl.sum(tl.load(part, mask=chunk < chunks, other=0.0), 0)
    if REDUCED:
        total += outside * tl.maximum(weight - tl.sum(tl.load(part + 1, mask=chunk < chunks, other=0.0), 0), 0.0)
    tl.store(out, tl.where(total == total, tl.minimum(tl.maximum(total, 0.0), most), total))


def compare(
    kind: str,
    p: tuple[Tensor, Tensor],
    q: tuple[Tensor, Tensor],
    draft_ids: Tensor | None,
    q_index: Tensor | None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compare each row of p with one of q.

    Args:
        kind: one of :data:`KINDS`; with ``draft_ids``, of :data:`OUTSIDE`.
        p, q: contiguous logits [B, N, V] and [B, I, Vd], or [R, V] and [R, Vd] without ``q_index``, and their rows'
            ln Σ exp as :func:`.row_pass` returns it.
        draft_ids: [Vd] the tokens of q's columns; None: V = Vd.
        q_index: [B, N] int64, -1 for none; None: rows in order.
        weight: w of "residual", of p's rows.

    Returns:
        Of p's rows, in fp32, or in the dtype of ``weight``. Where there is no q: inf, or 0 of "residual".
    """
    columns, drafted, rows = p[0].shape[-1], q[0].shape[-1], q[0].shape[-2]
    numbers = p[1] if weight is None else weight.contiguous()
    out = torch.empty(p[1].shape, dtype=numbers.dtype, device=p[1].device)
    index = out if q_index is None else q_index.contiguous()
    block, chunks = chunks_of(drafted)
    parts = torch.empty(out.numel(), chunks, 2, device=out.device)
    how = {"INDEXED": q_index is not None, "REDUCED": draft_ids is not None}
    _compare[out.numel(), chunks](
        *p, *q, out if draft_ids is None else draft_ids.contiguous(), index, numbers, parts,
        p[1].shape[-1], columns, rows, drafted, chunks, KIND=kind, BLOCK=block, num_warps=8, **how,
    )  # fmt: skip
    _sum[(out.numel(),)](
        parts, index, numbers, out, chunks, OUTSIDE.get(kind, 0.0), _MOST.get(kind, math.inf),
        0.0 if kind == RESIDUAL else math.inf, WEIGHTED=weight is not None, CHUNKS=triton.next_power_of_2(chunks),
        num_warps=1, **how,
    )  # fmt: skip
    return out


def with_totals(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits [..., V], contiguous, and their rows' ln Σ exp as :func:`compare` takes them."""
    logits = logits.contiguous()
    return logits, row_pass(logits, 1)[2]
