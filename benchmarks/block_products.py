"""Time the CPU kernels' products by block type and number of rows, in one thread, and those of the expanded weight.

    python -m benchmarks.block_products [--other name=DIRECTORY …] [--kinds Q4_1,Q8_0] [--rows 1,8,16,64,512]

A column per library: this checkout's kernels, and those of every other checkout that is named. "bf16" is the product of
the weight that is expanded to bf16, in this checkout's kernels, and "torch" is oneDNN's, which needs AVX-512. Calls go
through copies of a weight, which no core's cache holds, as in a model. All are timed in turn, and the shortest time of
each counts, so that neighbours disturb little. Prints microseconds per million weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn

from fsd_infer.backends.cpu import build
from fsd_infer.backends.cpu.kernels import FEW_TOKENS, Kernels, kernels
from fsd_infer.backends.cpu.packing import Packed
from fsd_infer.backends.cpu.structs import Linear

linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
SCALES |= {"Q2_K": (80, 82), "Q6_K": (208,), "IQ2_XXS": (0,)}  # where a block's fp16 numbers lie


def random_rows(kind: GGMLQuantizationType, rows: int, depth: int) -> np.ndarray:
    """Return rows of any codes, with scales of one order."""
    block, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.randint(0, 256, (rows, depth // block, size), dtype=np.uint8)
    for offset in SCALES[kind.name]:
        numbers = (np.random.rand(rows, depth // block) * 0.01 + 0.005).astype("<f2")
        blocks[:, :, offset : offset + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def checkout_kernels(directory: Path) -> Kernels:
    """Build and load the kernels of another checkout."""
    source = build._SOURCE
    build._SOURCE = directory / "fsd_infer/backends/cpu/kernels.cpp"
    try:
        current = kernels()
        assert current is not None, "needs kernels"
        return build.build_for(Kernels, current.name)
    finally:
        build._SOURCE = source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", action="append", default=[], help="name=directory of another checkout")
    parser.add_argument("--kinds", default=",".join(SCALES))
    parser.add_argument("--rows", default="1,4,8,12,16,24,32,64,65,128,512")
    parser.add_argument("--columns", type=int, default=1536)
    parser.add_argument("--depth", type=int, default=768)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number of rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    current = kernels()
    assert current is not None, "needs kernels"
    libraries = {"now": current}
    for name, _, directory in (other.partition("=") for other in options.other):
        libraries[name] = checkout_kernels(Path(directory))
    columns, depth, copies = options.columns, options.depth, range(options.copies)
    layers = [nn.Linear(depth, columns, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in copies]
    expanded = [Packed(layer) for layer in layers]
    print(f"{current.name}: µs per million weights of [{columns}, {depth}], up to {FEW_TOKENS} rows as of one text")
    print("type    rows; " + ", ".join(calls_with(torch.zeros(1, 1, depth), libraries, {}, expanded)))
    for name in options.kinds.split(","):
        kind = int(GGMLQuantizationType[name])
        stored = random_rows(GGMLQuantizationType[name], columns, depth)
        weights = {key: [packed(library, stored, kind, depth) for _ in copies] for key, library in libraries.items()}
        for rows in map(int, options.rows.split(",")):
            calls = calls_with(torch.randn(1, rows, depth).bfloat16(), libraries, weights, expanded)
            best = shortest(calls, len(copies), options.seconds)
            million = columns * depth / 1e6
            print(f"{name:8}{rows:4}" + "".join(f"{1e6 * best[key] / million:9.1f}" for key in calls), flush=True)


def calls_with(
    x: Tensor, libraries: dict[str, Kernels], weights: dict[str, list[tuple[Tensor, Linear]]], expanded: list[Packed]
) -> dict[str, Callable[[int], object]]:
    """Return products of x [1, rows, depth] with the copy of a number, by name."""

    def of_blocks(name: str) -> Callable[[int], object]:
        return lambda index: libraries[name].linear(x, weights[name][index][1])

    def of_bf16(index: int) -> Tensor:
        layer = expanded[index].native
        assert layer is not None, "oneDNN's layout is one that the kernels do not read"
        return libraries["now"].linear(x, layer)

    def of_torch(index: int) -> Tensor:
        return linear_pointwise(x, expanded[index].weight, None, "none", [], "")

    calls: dict[str, Callable[[int], object]] = {name: of_blocks(name) for name in libraries} | {"bf16": of_bf16}
    return calls | {"torch": of_torch} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else calls


def packed(library: Kernels, stored: np.ndarray, kind: int, depth: int) -> tuple[Tensor, Linear]:
    """Return packed panels, and the layer that reads them."""
    panels = library.pack_blocks(kind, stored, depth, None)
    assert panels is not None
    sizes = dict(columns=len(stored), depth=depth, kind=kind, side=library.block_side)
    return panels, Linear(panels=panels.data_ptr(), **sizes)


def shortest(calls: dict[str, Callable[[int], object]], copies: int, seconds: float) -> dict[str, float]:
    """Return the shortest seconds of each call with the number of a copy; all copies in turn, all calls in turn."""
    best = dict.fromkeys(calls, float("inf"))
    end, turn = time.perf_counter() + seconds, 0
    while turn < 1 or time.perf_counter() < end:
        turn += 1
        for name, call in calls.items():
            for copy in range(copies):
                start = time.perf_counter()
                call(copy)
                best[name] = min(best[name], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
