"""Draws of tokens by inverse CDF in Triton, in two steps: on one of a row's chunks, and within it.

So no CDF over the vocabulary is written. A chunk's sum and its numbers are computed alike in both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsd_core.sampling import Rest
from fsd_infer.backends.cuda.compare import with_totals
from fsd_infer.backends.cuda.kernels import VARYING, chunks_of, read_chunks


@triton.jit
def interval(mass, uniform, places, SIZE: tl.constexpr):
    """Return on which ``mass`` (fp64), none of 0, a uniform number falls, and how far into it; -1 if all are 0."""
    share = uniform.to(tl.float64) * tl.sum(mass, 0)
    hit = tl.min(tl.where((mass > 0) & (tl.cumsum(mass, 0) > share), places, SIZE), 0)
    last = tl.max(tl.where(mass > 0, places, -1), 0)
    hit = tl.where(hit < SIZE, hit, last)  # what is left of rounding is the last one's
    return hit, share - tl.sum(tl.where(places < hit, mass, 0.0), 0)


@triton.jit
def within(mass, share, places, SIZE: tl.constexpr):
    """Return the first of ``mass`` above 0 whose sum from the first on exceeds ``share``, else the last above 0."""
    hit = tl.min(tl.where((mass > 0) & (tl.cumsum(mass.to(tl.float64), 0) > share), places, SIZE), 0)
    last = tl.max(tl.where(mass > 0, places, 0), 0)
    return tl.where(hit < SIZE, hit, last)


@triton.jit
def _pick(X, SUMS, UNIFORMS, WHERE, OUT, columns, stride, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Draw an index from the softmax of a row whose chunks were read."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(WHERE + row) == 0:
        tl.store(OUT + row, 0)
        return
    chunk, place = tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    sums = SUMS + 3 * (row * chunks + chunk)
    high = tl.load(sums, mask=chunk < chunks, other=-float("inf"))
    part = tl.load(sums + 1, mask=chunk < chunks, other=0.0)
    scale = tl.where(part > 0, tl.exp(high - tl.max(high, 0)), 0.0)
    hit, share = interval((part * scale).to(tl.float64), tl.load(UNIFORMS + row), chunk, CHUNKS)
    hit = tl.maximum(hit, 0)
    is_here = chunk == hit
    ids = hit * BLOCK + place
    x = tl.load(X + row * stride + ids, mask=ids < columns, other=-float("inf")).to(tl.float32)
    weight = tl.exp(x - tl.sum(tl.where(is_here, high, 0.0), 0))  # as the chunk's sum has it
    share = share / tl.sum(tl.where(is_here, scale, 0.0), 0)
    token = hit * BLOCK + within(weight, share, place, BLOCK)
    tl.store(OUT + row, tl.minimum(token, columns - 1).to(tl.int64))


def sample_rows(logits: Tensor, uniforms: Tensor, where: Tensor) -> Tensor:
    """Return :func:`fsd_core.sampling.sample_rows`: [...] int64 of logits [..., V], uniforms and ``where`` [...]."""
    chosen = where.contiguous()
    flat, _, sums, block = read_chunks(logits, 0, chosen)
    out = torch.empty(where.shape, dtype=torch.int64, device=logits.device)
    chunks = sums.shape[1]
    _pick[(len(flat),)](
        flat, sums, uniforms.contiguous(), chosen.view(torch.uint8), out, flat.shape[1], flat.stride(0), chunks,
        CHUNKS=triton.next_power_of_2(chunks), BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _left(P, P_TOTAL, Q, Q_TOTAL, INDEX, NODES, WEIGHT, REFUSED, Q_INDEX, tree, ids, count, columns, rows, drafted,
          refusals, SAMPLED: tl.constexpr, REDUCED: tl.constexpr):  # fmt: skip
    """(w·p - q)+ of some tokens without the refused ones, at a tree's context: see Rest in fsd_core/sampling.py."""
    node, inside = tree * count + tl.load(NODES + tree), ids < columns
    p = tl.load(P + node * columns + ids, mask=inside, other=-float("inf")).to(tl.float32)
    left = tl.exp(p - tl.load(P_TOTAL + 2 * node))
    if SAMPLED:
        row = tl.load(Q_INDEX + tree)
        entry = ids.to(tl.int64)
        if REDUCED:
            entry = tl.load(INDEX + ids, mask=inside, other=-1)
        has_q = inside & (entry >= 0) & (row >= 0)
        row = tree * rows + tl.maximum(row, 0)
        q = tl.load(Q + row * drafted + entry, mask=has_q, other=-float("inf")).to(tl.float32)
        q = tl.where(has_q, tl.exp(q - tl.load(Q_TOTAL + 2 * row)), 0.0)
        left = tl.maximum(tl.load(WEIGHT + tree) * left - q, 0.0)
    for refusal in range(refusals):
        left = tl.where(ids == tl.load(REFUSED + tree * refusals + refusal), 0.0, left)
    return left


@triton.jit(do_not_specialize=VARYING)
def _left_sums(P, P_TOTAL, Q, Q_TOTAL, INDEX, NODES, WEIGHT, REFUSED, Q_INDEX, SUMS, count, columns, rows, drafted,
               refusals, chunks, SAMPLED: tl.constexpr, REDUCED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    tree, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    left = _left(P, P_TOTAL, Q, Q_TOTAL, INDEX, NODES, WEIGHT, REFUSED, Q_INDEX, tree, ids,
                 count, columns, rows, drafted, refusals, SAMPLED, REDUCED)  # fmt: skip
    tl.store(SUMS + tree * chunks + chunk, tl.sum(left, 0))


@triton.jit(do_not_specialize=VARYING)
def _draw(P, P_TOTAL, Q, Q_TOTAL, INDEX, NODES, WEIGHT, REFUSED, Q_INDEX, SUMS, UNIFORMS, OUT, PLACES, OTHERWISE,
          count, columns, rows, drafted, refusals, chunks, row_stride, stride, width,
          SAMPLED: tl.constexpr, REDUCED: tl.constexpr, OF_WALK: tl.constexpr, CHUNKS: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Draw a token of what is left, in one of whose chunks it lies. If nothing is left: V, or p's likeliest token."""
    tree, places, place = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS), tl.arange(0, BLOCK)
    sums = tl.load(SUMS + tree * chunks + places, mask=places < chunks, other=0.0).to(tl.float64)
    node, out, otherwise = tl.load(NODES + tree), OUT + tree, columns.to(tl.int64)
    uniforms = UNIFORMS + tree * row_stride
    if OF_WALK:
        uniforms += node * stride
        out = OUT + tree * width + tl.load(PLACES + tree)
        otherwise = tl.load(OTHERWISE + tree * count + node)
    hit, share = interval(sums, tl.load(uniforms), places, CHUNKS)
    start = tl.maximum(hit, 0) * BLOCK
    left = _left(P, P_TOTAL, Q, Q_TOTAL, INDEX, NODES, WEIGHT, REFUSED, Q_INDEX, tree, start + place,
                 count, columns, rows, drafted, refusals, SAMPLED, REDUCED)  # fmt: skip
    token = (start + within(left, share, place, BLOCK)).to(tl.int64)
    tl.store(out, tl.where(hit < 0, otherwise, token))


def draw_rest(rest: Rest, uniforms: Tensor) -> Tensor:
    """Return :func:`fsd_core.sampling.draw_rest`: [B] int64."""
    p, p_total = with_totals(rest.p_logits)
    q, q_total = (None, None) if rest.q_logits is None else with_totals(rest.q_logits)
    ids, index = rest.draft_ids, rest.draft_index
    if ids is not None and index is None:
        index = torch.full((p.shape[-1],), -1, device=ids.device)
        index.index_copy_(0, ids.long(), torch.arange(len(ids), device=ids.device))
    out = torch.empty_like(rest.nodes, memory_format=torch.contiguous_format)
    rest = rest._replace(p_logits=p, weight=rest.weight.float(), q_logits=q, draft_ids=index)
    draw_left(rest, p_total, q_total, uniforms[:, None, None], out)
    return out


def draw_left(
    rest: Rest,
    p_total: Tensor,
    q_total: Tensor | None,
    uniforms: Tensor,
    out: Tensor,
    places: Tensor | None = None,
    likeliest: Tensor | None = None,
) -> None:
    """Draw a token of each row. Logits are contiguous; ``rest.draft_ids`` are the columns of q by token, [V].

    Args:
        rest: what is left of p.
        p_total, q_total: ln Σ exp of rows, as :func:`.row_pass` returns them.
        uniforms: [B, N, ·], of which the column 1 of the rest's nodes counts; or [B, 1, 1].
        out: [B] for the tokens, V where nothing is left; or [B, K].
        places: [B] where in the latter.
        likeliest: [B, N] tokens for contexts where nothing is left.
    """
    p, q = rest.p_logits, rest.q_logits if rest.q_index is not None else None
    (batch, count, columns), (rows, drafted) = p.shape, (0, 0) if q is None else q.shape[1:]
    block, chunks = chunks_of(columns)
    sums = torch.empty(batch, chunks, device=p.device)
    refused = rest.refused.contiguous()
    tensors = (
        p, p_total, p if q is None else q, p_total if q is None else q_total,
        p if rest.draft_ids is None else rest.draft_ids, rest.nodes.contiguous(), rest.weight.contiguous(), refused,
        rest.nodes if rest.q_index is None else rest.q_index.contiguous(), sums,
    )  # fmt: skip
    sizes = count, columns, rows, drafted, refused.shape[1], chunks
    kind = {"SAMPLED": q is not None, "REDUCED": rest.draft_ids is not None, "BLOCK": block, "num_warps": 8}
    _left_sums[batch, chunks](*tensors, *sizes, **kind)
    of_walk = places is not None
    _draw[(batch,)](
        *tensors, uniforms[..., 1] if of_walk else uniforms, out, places if of_walk else out,
        likeliest if of_walk else out, *sizes, *uniforms.stride()[:2], out.shape[-1],
        OF_WALK=of_walk, CHUNKS=triton.next_power_of_2(chunks), **kind,
    )  # fmt: skip
