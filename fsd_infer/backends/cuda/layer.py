"""What lies between a decoder layer's products, in Triton: RMS norms with the residual sum, rotations, and SiLU.

Each is one launch. Numbers are rounded where transformers' modules round them, but for the rotation, which is rounded
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(X, DELTA, WEIGHT, SUM, OUT, columns, out_stride, epsilon, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(X + row * columns + column, mask=inside, other=0.0)
    if ADDS:
        delta = tl.load(DELTA + row * columns + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(X.dtype.element_ty)
        tl.store(SUM + row * columns + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns + epsilon)
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
    normed = (wide * scale).to(X.dtype.element_ty).to(tl.float32) * weight
    tl.store(OUT + row * out_stride + column, normed.to(OUT.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + delta and its RMS norm times ``weight``, in one pass.

    Args:
        x, delta: [T, H]; no delta: x itself.
        weight: [H].
        epsilon: added to the mean square.
        out: [T, H] for the norm, whose rows may lie apart.
    """
    x = x.contiguous()
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x) if out is None else out
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    _add_norm[(rows,)](
        x, x if delta is None else delta.contiguous(), weight, total, out, columns, out.stride(0), epsilon,
        ADDS=delta is not None, BLOCK=block, num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return total, out


@triton.jit
def _angles(POSITIONS, FREQUENCIES, OUT, count, factor, row_length, row_stride, stride,
            HALF: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < HALF
    position = tl.load(POSITIONS + token // row_length * row_stride + token % row_length * stride).to(tl.float32)
    angle = position * tl.load(FREQUENCIES + column, mask=inside, other=0.0)
    cosine, sine = (tl.cos(angle) * factor).to(OUT.dtype.element_ty), (tl.sin(angle) * factor).to(OUT.dtype.element_ty)
    cosines = OUT + token.to(tl.int64) * 2 * HALF + column
    sines = cosines + count * 2 * HALF
    tl.store(cosines, cosine, mask=inside)
    tl.store(cosines + HALF, cosine, mask=inside)
    tl.store(sines, sine, mask=inside)
    tl.store(sines + HALF, sine, mask=inside)


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, M, D] of rotary embeddings in one launch; transformers' module takes ten.

    Args:
        positions: [B, M] int64.
        frequencies: [D/2] fp32, radians per position.
        factor: by which both are multiplied.
        dtype: of the result.
    """
    half = len(frequencies)
    out = torch.empty(2, *positions.shape, 2 * half, dtype=dtype, device=positions.device)
    _angles[(positions.numel(),)](
        positions, frequencies, out, positions.numel(), factor, positions.shape[1], *positions.stride(),
        HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _rotate(QKV, COS, SIN, Q_NORM, K_NORM, SLOTS, Q, K, V, count, epsilon, k_batch, k_head, k_slot,
            HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
            NORMED: tl.constexpr):  # fmt: skip
    """One head of one token: a query is rotated, a key rotated and kept, a value kept."""
    token, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < D
    half: tl.constexpr = D // 2
    partner = tl.where(column < half, column + half, column - half)
    source = QKV + (token.to(tl.int64) * (HEADS + 2 * KEY_HEADS) + head) * D
    raw = tl.load(source + column, mask=inside, other=0.0)
    batch, slot = (token // count).to(tl.int64), tl.load(SLOTS + token).to(tl.int64)
    if head >= HEADS + KEY_HEADS:
        place = V + batch * k_batch + (head - HEADS - KEY_HEADS).to(tl.int64) * k_head + slot * k_slot
        tl.store(place + column, raw, mask=inside)
    else:
        x = raw.to(tl.float32)
        other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + epsilon)
            weight = tl.where(head < HEADS, Q_NORM, K_NORM)
            x = (x * scale).to(raw.dtype).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0)
            other = (other * scale).to(raw.dtype).to(tl.float32) * tl.load(weight + partner, mask=inside, other=0.0)
        cosine = tl.load(COS + token * D + column, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(SIN + token * D + column, mask=inside, other=0.0).to(tl.float32)
        turned = (x * cosine + tl.where(column < half, -other, other) * sine).to(raw.dtype)
        if head < HEADS:
            tl.store(Q + (token.to(tl.int64) * HEADS + head) * D + column, turned, mask=inside)
        else:
            place = K + batch * k_batch + (head - HEADS).to(tl.int64) * k_head + slot * k_slot
            tl.store(place + column, turned, mask=inside)


def rotate_and_store(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate queries and keys, and write keys and values to their slots. Slots out of range are not noticed.

    Args:
        qkv: [B, M, (heads + 2 key heads) · D], queries, keys and values.
        angles: cosines and sines [B, M, D].
        norms: weights [D] of an RMS norm of each query and key before the rotation, or None.
        epsilon: of these norms.
        keys, values: [B, key heads, S, D], of equal strides; written to.
        slots: [B, M] int64.

    Returns:
        The queries [B, M, heads, D].
    """
    batch, count, _ = qkv.shape
    key_heads, width = keys.shape[1], keys.shape[3]
    heads = qkv.shape[2] // width - 2 * key_heads
    query = qkv.new_empty(batch, count, heads, width)
    cosine, sine = (part.expand(batch, -1, -1).contiguous() for part in angles)
    _rotate[batch * count, heads + 2 * key_heads](
        qkv.contiguous(), cosine, sine, *(norms or (qkv, qkv)), slots.contiguous(), query, keys, values,
        count, epsilon, *keys.stride()[:3],
        HEADS=heads, KEY_HEADS=key_heads, D=width, BLOCK=triton.next_power_of_2(width), NORMED=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _silu_mul(X, OUT, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(X + row * 2 * columns + column, mask=inside, other=0.0)
    up = tl.load(X + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(OUT + row * columns + column, (silu * up).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up [T, I] of both, side by side [T, 2I]."""
    gate_up = gate_up.contiguous()
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    _silu_mul[rows, triton.cdiv(columns, 1024)](gate_up, out, columns, BLOCK=1024, num_warps=4)
    return out
