"""Attention of new tokens over a text and a tree, in Triton: the text's length is read on the device.

Flash decoding (Dao et al. 2023): the visible slots of a row are split among programs. Each keeps a running softmax over
its part, and a second kernel joins the parts. So a short and a long text both keep the whole device busy. Query heads
that share a key head are rows of one product, so keys and values are read once and never copied.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_NEW = 64  # new tokens of a row; dense attention is faster for more
_HIDDEN = tl.constexpr(-1e30)  # the score of a slot that a node does not see; infinity would give NaN in exp(x - x)
_LOG2E = tl.constexpr(1.4426950408889634)  # scores are in powers of two
_PER_PROCESSOR = 3  # programs that keep one multiprocessor busy
_MAX_SPLITS = 64


class Blocks(NamedTuple):
    """How the kernel cuts its work: rows and slots of a tile, warps of a program, and tiles that are on their way."""

    rows: int
    slots: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, width: int, itemsize: int) -> Blocks:
        """Choose tiles that fit 99 KB of shared memory, the least of the cards since Ampere, and 255 registers.

        Args:
            rows: queries that share a key head.
            width: of a head, padded to a power of two.
            itemsize: bytes of a number.
        """
        if itemsize > 2:  # without tensor cores each product is unrolled
            most, slots, warps = 32 if width <= 64 else 16, 16, 4
        elif width <= 64:
            most, slots, warps = 128, 64, 8
        elif width <= 128:
            most, slots, warps = 64, 64, 4
        else:
            most, slots, warps = 64, 32, 8
        size = min(most, max(16, triton.next_power_of_2(rows)))
        return cls(size, slots, warps if size == most else 4, 3 if size == 16 and width <= 128 else 2)


@triton.jit
def _step(q, keys, values, slots, end, visible, scale, cap, high, total, acc,
          slot_stride, columns, column_mask, CAPPED: tl.constexpr):  # fmt: skip
    """One tile of slots: the running maximum [R] (in powers of two), sum [R] and weighted values [R, D]."""
    inside = slots < end
    at = slots[:, None] * slot_stride + columns[None, :]
    load = inside[:, None] & column_mask[None, :]
    k = tl.load(keys + at, mask=load, other=0.0)
    v = tl.load(values + at, mask=load, other=0.0)
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CAPPED:
        score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)  # tanh
    visible = visible & inside[None, :]
    score = tl.where(visible, score * _LOG2E, _HIDDEN)
    new = tl.maximum(high, tl.max(score, 1))
    weight = tl.where(visible, tl.exp2(score - new[:, None]), 0.0)
    rescale = tl.exp2(high - new)
    acc = acc * rescale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return new, total * rescale + tl.sum(weight, 1), acc


@triton.jit
def _attend(Q, K, V, LENGTHS, VISIBLE, POSITIONS, ACC, HIGH, TOTAL, scale, cap, window, count, beyond,
            q_batch, q_node, q_head, k_batch, k_head, k_slot,
            SPLITS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
            BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
            WINDOWED: tl.constexpr, CAPPED: tl.constexpr):  # fmt: skip
    """A part of the slots for a block of rows of one key head. Row r is query head r % GROUP of node r // GROUP."""
    split, block = tl.program_id(0), tl.program_id(1)
    batch, head = (tl.program_id(2) // HEADS).to(tl.int64), (tl.program_id(2) % HEADS).to(tl.int64)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    node, known = row // GROUP, row < count * GROUP
    query_head = head * GROUP + row % GROUP
    columns = tl.arange(0, BLOCK_D)
    column_mask = columns < D
    at = batch * q_batch + node[:, None] * q_node + query_head[:, None] * q_head + columns[None, :]
    q = tl.load(Q + at, mask=known[:, None] & column_mask[None, :], other=0.0)
    length = tl.load(LENGTHS + batch).to(tl.int32)
    first, end = 0, length + beyond
    position = tl.zeros([BLOCK_R], tl.int32)
    if WINDOWED:
        position = tl.load(POSITIONS + batch * count + node, mask=known, other=2**30).to(tl.int32)
        first = tl.maximum(tl.min(position, 0) - window + 1, 0)
        first = tl.minimum(first, length) // BLOCK_S * BLOCK_S
    part = tl.cdiv(tl.cdiv(end - first, SPLITS), BLOCK_S) * BLOCK_S
    low = first + split * part
    stop = tl.minimum(low + part, end)
    high = tl.full([BLOCK_R], _HIDDEN, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    keys, values = K + batch * k_batch + head * k_head, V + batch * k_batch + head * k_head
    for start in range(low, tl.minimum(stop, length), BLOCK_S):  # the text
        slots = start + tl.arange(0, BLOCK_S)
        visible = known[:, None] & (slots < length)[None, :]
        if WINDOWED:
            visible = visible & (position[:, None] - slots[None, :] < window)
        high, total, acc = _step(q, keys, values, slots, tl.minimum(stop, length), visible, scale, cap, high, total,
                                 acc, k_slot, columns, column_mask, CAPPED)  # fmt: skip
    for start in range(tl.maximum(low, length), stop, BLOCK_S):  # the tree
        slots = start + tl.arange(0, BLOCK_S)
        inside = known[:, None] & (slots < stop)[None, :]
        after = VISIBLE + (batch * count + node)[:, None] * beyond + (slots - length)[None, :]
        visible = tl.load(after, mask=inside, other=0) != 0
        high, total, acc = _step(q, keys, values, slots, stop, visible, scale, cap, high, total,
                                 acc, k_slot, columns, column_mask, CAPPED)  # fmt: skip
    out = (batch * count + node) * (HEADS * GROUP) + query_head
    if SPLITS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    else:
        tl.store(HIGH + out * SPLITS + split, high, mask=known)
        tl.store(TOTAL + out * SPLITS + split, total, mask=known)
    place = (out * SPLITS + split)[:, None] * D + columns[None, :]
    tl.store(ACC + place, acc.to(ACC.dtype.element_ty), mask=known[:, None] & column_mask[None, :])


@triton.jit
def _join(ACC, HIGH, TOTAL, OUT, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join the parts of one query: a mean of their values, weighted by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    split, columns = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    high, total = tl.load(HIGH + row * SPLITS + split), tl.load(TOTAL + row * SPLITS + split)
    weight = tl.where(total > 0, tl.exp2(high - tl.max(high, 0)), 0.0)
    read = (total > 0)[:, None] & (columns < D)[None, :]
    acc = tl.load(ACC + (row * SPLITS + split)[:, None] * D + columns[None, :], mask=read, other=0.0)
    denominator = tl.sum(weight * total, 0)
    out = tl.sum(acc * weight[:, None], 0) / tl.where(denominator > 0, denominator, 1.0)
    tl.store(OUT + row * D + columns, out.to(OUT.dtype.element_ty), mask=columns < D)


def splits_for(programs: int, processors: int) -> int:
    """Return into how many parts, a power of two, slots are split if ``programs`` run without splitting."""
    wanted = max(1, min(_MAX_SPLITS, _PER_PROCESSOR * processors // max(1, programs)))
    return 1 << (wanted.bit_length() - 1)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    visible_after: Tensor,
    scale: float,
    positions: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    splits: int = 0,
) -> Tensor:
    """Attend from M new tokens of each row to its text and to E slots after it.

    Args:
        query: [B, M, heads, D]; D entries of a head are contiguous.
        keys, values: [B, key heads, S, D], of equal strides.
        lengths: [B] int64; slots 0 to length - 1 hold the text, token i in slot i.
        visible_after: [B, M, E] bool; whether token m sees slot length + e. Includes any window's limit.
        scale: of the scores.
        positions: [B, M] int64, of the new tokens; needed if there is a window.
        window: a token sees the text's tokens less than this many positions before it; 0: all.
        softcap: scores become softcap · tanh(score / softcap); 0: they do not.
        splits: parts of the slots, a power of two; 0: as the device needs.

    Returns:
        [B, M, heads, D]
    """
    batch, count, heads, width = query.shape
    key_heads = keys.shape[1]
    group, block_d = heads // key_heads, max(16, triton.next_power_of_2(width))
    blocks = Blocks.of(count * group, block_d, query.element_size())
    row_blocks = triton.cdiv(count * group, blocks.rows)
    splits = splits or splits_for(row_blocks * batch * key_heads, _processors(query.device))
    out = query.new_empty(batch, count, heads, width)
    rows = batch * count * heads
    acc = out if splits == 1 else query.new_empty(rows, splits, width, dtype=torch.float32)
    high, total = query.new_empty(2, rows, splits, dtype=torch.float32)
    visible_bytes = visible_after.contiguous().view(torch.uint8)
    assert (positions is not None or not window) and query.dtype == keys.dtype == values.dtype
    assert query.stride(3) == keys.stride(3) == 1 and keys.stride() == values.stride()
    _attend[splits, row_blocks, batch * key_heads](
        query, keys, values, lengths, visible_bytes,
        lengths if positions is None else positions.contiguous(), acc, high, total,
        scale, softcap, window, count, visible_after.shape[-1],
        *query.stride()[:3], *keys.stride()[:3],
        SPLITS=splits, HEADS=key_heads, GROUP=group, D=width, BLOCK_D=block_d, BLOCK_R=blocks.rows,
        BLOCK_S=blocks.slots, WINDOWED=window > 0, CAPPED=softcap > 0, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if splits > 1:
        _join[(rows,)](acc, high, total, out, SPLITS=splits, D=width, BLOCK_D=block_d, num_warps=4)
    return out
