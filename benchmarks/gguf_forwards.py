"""Time forwards on a GGUF file's own weights and on their bf16 expansion, in turns in one process.

    python -m benchmarks.gguf_forwards [--target FILE.gguf] --json benchmarks/results/gguf-forwards.json

Reports the least seconds of a forward over 1 to 32 tokens after 128 tokens of context, and of reading a prompt of 384
tokens. The record also has the seconds to load and the bytes of the weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.recorded import BUILT_IN, parser_of, record_main
from fsd_bench.probe import Probe
from fsd_infer import FuzzyDecoder
from fsd_infer.cpu.ops import packed_products

TOKENS = (1, 2, 4, 6, 8, 16, 32)
CONTEXT, PROMPT = 128, 384


def seconds(call: Callable[[], object]) -> float:
    """Return the wall seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.inference_mode()
def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record. Raises FsdError."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    calls: dict[str, dict[str, Callable[[], object]]] = {}
    models: dict[str, dict[str, Any]] = {}
    for name in ("expanded", "file"):
        start = time.perf_counter()
        target = FuzzyDecoder.from_pretrained(args.target, "none", device="cpu", expand=name == "expanded").target
        loaded = time.perf_counter() - start
        weights = sum(made.weight.nbytes if made.kind else 2 * made.columns * made.depth
                      for made in packed_products(target.model))  # fmt: skip
        probe = Probe(target, CONTEXT, TOKENS[-1])
        calls[name] = {str(tokens): partial(probe, tokens) for tokens in TOKENS}
        calls[name]["prompt"] = partial(Probe, target, PROMPT, 1)
        models[name] = {"load_seconds": loaded, "weight_bytes": weights, "forward_seconds": {}}
    for shape in calls["file"]:
        for _ in range(args.repeats):
            for name, facts in models.items():
                best = facts["forward_seconds"]
                best[shape] = min(best.get(shape, float("inf")), seconds(calls[name][shape]))
    own, other = (models[name]["forward_seconds"] for name in ("file", "expanded"))
    return {
        "target": Path(args.target).name,
        "context": CONTEXT,
        "prompt": PROMPT,
        "models": models,
        "ratios": {shape: own[shape] / other[shape] for shape in own},
    }


def report(record: dict[str, Any]) -> str:
    """Return a line per model and a line per number of tokens."""
    models = record["models"]
    lines = [f"{name}: {facts['weight_bytes'] / 1e6:.0f} MB, loaded in {facts['load_seconds']:.1f} s"
             for name, facts in models.items()]  # fmt: skip
    for shape, ratio in record["ratios"].items():
        times = ", ".join(f"{name} {1e3 * facts['forward_seconds'][shape]:.1f} ms" for name, facts in models.items())
        lines.append(f"{shape}: {times}, ratio {ratio:.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.gguf_forwards", __doc__, target=(BUILT_IN, "built-in name or GGUF file"), threads=None,
        repeats=(20, "forwards of each kind"), json=...,
    )  # fmt: skip
    return record_main("benchmarks.gguf_forwards", parser, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
