"""Forwards from a GGUF file's own weights beside those from its bf16 expansion, in turns in one process.

    python -m benchmarks.gguf_forwards [--target FILE.gguf] --json benchmarks/results/gguf-forwards.json

Reports the least seconds of a forward after 128 tokens of context, by tokens, of a prompt of 384 tokens, and loading.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.recorded import record_main
from fsd_bench.environment import environment
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.cpu.ops import packed_products

TOKENS = (1, 2, 4, 6, 8, 16, 32)
CONTEXT, PROMPT = 128, 384


class Forwards:
    """Forwards of a target over new tokens, all after the same context or none."""

    def __init__(self, target: Target) -> None:
        self.target, self.cache = target, target.new_cache(1, max(CONTEXT + TOKENS[-1], PROMPT))
        self.seconds(CONTEXT, 0)

    @torch.inference_mode()
    def seconds(self, tokens: int, context: int) -> float:
        """Time one forward over ``tokens`` tokens. Without a context only the last one's logits, as for a prompt."""
        where = torch.arange(context, context + tokens)[None]
        visible = torch.arange(context + tokens)[None, None] <= where[..., None]
        self.cache.set_write_slots(where, context, context + tokens)
        start = time.perf_counter()
        self.target.forward(where * 7919 % self.target.vocab_size, where, visible, self.cache, keep=0 if context else 1)
        return time.perf_counter() - start


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    forwards, facts = {}, {}
    for name in ("expanded", "file"):
        start = time.perf_counter()
        decoder = FuzzyDecoder.from_pretrained(args.target, "none", device="cpu", expand=name == "expanded")
        seconds = time.perf_counter() - start
        packed = packed_products(decoder.target.model)
        weights = sum(made.weight.nbytes if made.kind else 2 * made.columns * made.depth for made in packed)
        forwards[name], facts[name] = Forwards(decoder.target), {"load_seconds": seconds, "weight_bytes": weights}
    shapes = {str(tokens): (tokens, CONTEXT) for tokens in TOKENS} | {"prompt": (PROMPT, 0)}
    best = {name: dict.fromkeys(shapes, float("inf")) for name in forwards}
    for _ in range(args.repeats):
        for shape, (tokens, context) in shapes.items():
            for name, those in forwards.items():
                best[name][shape] = min(best[name][shape], those.seconds(tokens, context))
    ratios = {shape: best["file"][shape] / best["expanded"][shape] for shape in shapes}
    return {
        "environment": environment(command),
        "target": args.target if args.target == "smollm2-135m" else Path(args.target).name,
        "context": CONTEXT,
        "prompt": PROMPT,
        "repeats": args.repeats,
        "models": {name: {**facts[name], "forward_seconds": best[name]} for name in forwards},
        "ratios": ratios,
    }


def report(record: dict[str, Any]) -> str:
    lines = [f"{name}: {facts['weight_bytes'] / 1e6:.0f} MB, loaded in {facts['load_seconds']:.1f} s"
             for name, facts in record["models"].items()]  # fmt: skip
    for shape, ratio in record["ratios"].items():
        times = ", ".join(f"{name} {facts['forward_seconds'][shape] * 1e3:.1f} ms"
                          for name, facts in record["models"].items())  # fmt: skip
        lines.append(f"{shape}: {times}, ratio {ratio:.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gguf_forwards", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", default="smollm2-135m", help="a built-in name or a GGUF file (%(default)s)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    return record_main("benchmarks.gguf_forwards", parser, run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
