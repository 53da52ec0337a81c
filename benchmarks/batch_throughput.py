"""Tokens per second of whole batches, plain and drafting, at several batch sizes on the same prompts.

Writes one JSON record, ``{"batches": {"1": {"methods", "ratios", ...}, ...}, "settings": ..., "environment": ...}``.
Every size decodes all prompts; batches hold prompts of any categories, as a server's would.

Run: python -m benchmarks.batch_throughput [--target NAME_OR_DIRECTORY] [--sizes 1,2,4,8] [--json RECORD]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.recorded import record_main
from fsd_bench import Settings, build_record, make_methods
from fsd_bench.environment import environment
from fsd_bench.models import Models
from fsd_bench.runner import encode_rows, read_rows
from fsd_bench.schedule import take_turns
from fsd_bench.settings import set_threads
from fsd_infer.cli.report import number, table
from fsd_infer.drafters.shape import AUTO, parse_tree
from fsd_infer.errors import FsdError

ROOT = Path(__file__).resolve().parent.parent


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_throughput", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", help="head of the target (default: the one shipped with it)")
    parser.add_argument("--methods", default="plain,exact,exact+lookup=exact@shipped+lookup", help="(%(default)s)")
    parser.add_argument("--sizes", default="1,2,4,8", help="(%(default)s)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--limit", type=int, default=16, help="prompts, a multiple of the sizes (%(default)s)")
    parser.add_argument("--every", type=int, default=15, help="each so-many-th row (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--tree", default=AUTO, help="of heads: auto or DEPTH,WIDTH,NODES (%(default)s)")
    parser.add_argument("--dtype", default="bf16", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "batch-throughput.json")
    return parser


def measure(settings: Settings, sizes: Sequence[int], progress: bool = False) -> dict[str, Any]:
    """The record but its environment. Models are loaded once; sizes are measured one after the other, methods in turns.

    Raises:
        FsdError: whatever a benchmark raises, and prompts that do not fill the batches.
    """
    settings.check()
    set_threads(settings)
    models = Models(settings)
    methods = make_methods(settings.methods, models)
    asked = [replace(prompt, category="all") for prompt in encode_rows(read_rows(settings), models)]
    uneven = [size for size in sizes if size < 1 or len(asked) % size]
    if uneven:
        raise FsdError(f"{len(asked)} prompts do not fill batches of {uneven[0]}: choose limit and sizes that divide.")
    described = {method.name: method.describe() for method in methods}
    batches = {}
    for size in sizes:
        turns = take_turns(replace(settings, batch_size=size), methods, asked, None, progress)
        batches[str(size)] = build_record(asked, described, turns, settings.seed, settings.baselines)
    return {"batches": batches, "settings": settings.to_dict()}


def sizes_table(record: dict[str, Any]) -> str:
    """Tokens per second by method and batch size."""
    parts = record["batches"]
    names = list(next(iter(parts.values()))["methods"])
    rates = [[number(part["methods"][name]["tokens_per_second"], 1) for part in parts.values()] for name in names]
    return table(["tok/s of a batch of", *parts], [[name, *row] for name, row in zip(names, rates)])


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record of a command line. Raises FsdError."""
    try:
        sizes = [int(size) for size in args.sizes.split(",")]
    except ValueError:
        raise FsdError(f"--sizes takes numbers, e.g. 1,2,4,8; got {args.sizes!r}.") from None
    methods = args.methods.split(",")
    settings = Settings(
        args.prompts, methods, target=args.target, drafter=args.drafter, tree=parse_tree(args.tree), dtype=args.dtype,
        limit=args.limit, every=args.every, max_new_tokens=args.max_new_tokens, repeat=args.repeat,
        threads=args.threads, baselines=["plain"] if "plain" in methods else [],
    )  # fmt: skip
    record = measure(settings, sizes, progress=True)
    record["environment"] = environment(command)
    record["settings"]["target"] = Path(args.target).name
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print the table."""
    return record_main("benchmarks.batch_throughput", build_parser(), run, sizes_table, argv)


if __name__ == "__main__":
    sys.exit(main())
