"""Products of up to 16 rows in Triton, a candidate to take the place of cuBLAS's: those reach 78 % of the bandwidth.

:mod:`benchmarks.gpu_round` measures both side by side. Decoding does not use this one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What a program holds of the weight, and how: outputs, numbers of each, tiles on their way, warps."""

    outputs: int
    depth: int
    stages: int
    warps: int


TILES = (Tile(16, 256, 5, 4), Tile(16, 512, 4, 4), Tile(32, 256, 4, 4), Tile(64, 128, 4, 4))


@triton.jit
def _few_rows(X, W, OUT, rows, depth, outputs,
              BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    row, output = tl.arange(0, BLOCK_R), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    known, inside = row < rows, output < outputs
    weights = W + output.to(tl.int64)[:, None] * depth + column[None, :]
    inputs = X + row[None, :] * depth + column[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(0, depth, BLOCK_K):
        w = tl.load(weights + start, mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        x = tl.load(inputs + start, mask=known[None, :], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    place = OUT + row[None, :] * outputs + output[:, None]
    tl.store(place, total.to(OUT.dtype.element_ty), mask=inside[:, None] & known[None, :])


def product(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """Return x · weightᵀ [M, N] of x [M, K] with M <= 16 and weight [N, K], K a multiple of the tile's depth."""
    (rows, depth), outputs = x.shape, weight.shape[0]
    assert rows <= 16 and depth % tile.depth == 0 and x.is_contiguous() and weight.is_contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _few_rows[(triton.cdiv(outputs, tile.outputs),)](
        x, weight, out, rows, depth, outputs, BLOCK_R=16, BLOCK_N=tile.outputs, BLOCK_K=tile.depth,
        num_stages=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out
