"""Rows of GGUF types whose codes stand for several numbers at once, rewritten with a code per number."""

from __future__ import annotations

from functools import cache

import numpy as np

IQ2_XXS = 16  # ggml's number
_CODES = 256  # per block


@cache
def _grid() -> np.ndarray:
    """Return [256] uint32: for each index of the type's grid eight codes 0, 1 or 2, in nibbles."""
    from gguf import quants  # imported late, only for files of this type

    quants.IQ2_XXS.init_grid()
    grid: np.ndarray = quants.IQ2_XXS.grid  # type: ignore[assignment]
    sizes = np.searchsorted(np.array([8, 25, 43]), grid.reshape(_CODES, 8))
    return _in_nibbles(sizes)


@cache
def _signs() -> np.ndarray:
    """Return [128] uint32: for seven signs, and an eighth that makes the number of negatives even, 8 in nibbles."""
    bits = np.arange(128)[:, None] >> np.arange(7) & 1
    return _in_nibbles(8 * np.concatenate([bits, bits.sum(1, keepdims=True) & 1], 1))


def _in_nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)


def rewritten(ggml_type: int, rows: np.ndarray) -> np.ndarray:
    """Return rows as ``read_record`` in native/records.h takes them: those of IQ2_XXS with a nibble per number.

    Args:
        ggml_type: ggml's number of the type.
        rows: [out, bytes] uint8, in the file's layout.

    Returns:
        [out, bytes] uint8, contiguous. For IQ2_XXS a block of 256 numbers has its fp16 scale, eight integers that
        multiply it, one for 32 numbers each, and the codes; VALUES in native/blocks.h has what the codes stand for, in
        eighths.
    """
    if ggml_type != IQ2_XXS:
        return rows
    blocks = rows.reshape(len(rows), -1, 66)
    pairs = np.ascontiguousarray(blocks[..., 2:]).view("<u4").reshape(*blocks.shape[:2], 8, 2)
    which = np.ascontiguousarray(pairs[..., 0]).view(np.uint8).reshape(*pairs.shape[:3], 4)
    signs = pairs[..., 1, None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    codes = (_grid()[which] | _signs()[signs]).astype("<u4").view(np.uint8).reshape(*blocks.shape[:2], _CODES // 2)
    scales = (2 * (pairs[..., 1] >> 28) + 1).astype(np.uint8)
    return np.concatenate([blocks[..., :2], scales, codes], -1).reshape(len(rows), -1)
