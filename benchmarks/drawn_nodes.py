"""Compare trees with drawn nodes, trees of likely tokens and drawn chains, above temperature 0, under the exact rule.

    python -m benchmarks.drawn_nodes --json benchmarks/results/drawn-240.json

Each temperature is one run of `fsd-bench run` in one process. The same command continues where it was stopped.
Finished temperatures are read from their own records, `drawn-240-1.0.json` and so on: delete these to measure again.
The record has τ over all prompts and its mean over categories, and ratios to likely tokens with intervals over prompts.
Trees are those of `auto`, which follows the clock: leave the machine alone meanwhile. With ``--seed`` they follow the
text alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, record_main, run_resumed
from fsd_core.files import read_json
from fsd_core.tables import number, table
from fsd_infer.trees.shape import parse_tree

METHODS = {"likely": "exact:draw=false", "chain": "exact:block=true", "drawn": "exact:block=false"}
_AGAIN = "Delete it to measure again."
COLUMNS = (
    "tau",
    "tau_category_mean",
    "tokens_per_second",
    "decode_tokens_per_second",
    "milliseconds_per_round",
    "trees",
)


def _run(args: argparse.Namespace, temperature: float, file: Path | None) -> dict[str, Any]:
    methods = [f"{name}={rule}" for name, rule in METHODS.items()]
    seed = None if args.seed is None else int(args.seed)
    return run_resumed(
        args.prompts, methods, file, target=args.target, drafter=args.drafter, temperature=temperature,
        max_new_tokens=args.max_new_tokens, every=args.every, limit=args.limit, seed=seed,
        tree=parse_tree(args.tree) if args.tree else None,
    )  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return by temperature each method's numbers and its ratios to likely tokens."""
    results: dict[str, Any] = {}
    for temperature in args.temperatures:
        file = args.json and args.json.with_name(f"{args.json.stem}-{temperature}.json")
        record = read_json(file, _AGAIN) if file and file.exists() else _run(args, float(temperature), file)
        methods = {
            name: {key: facts[key] for key in COLUMNS if key in facts} for name, facts in record["methods"].items()
        }
        results[temperature] = {"methods": methods, "ratios": record["ratios"]["likely"]}
    return {"temperatures": results}


def report(record: dict[str, Any]) -> str:
    """Return a table of all temperatures."""
    rows = []
    for temperature, result in record["temperatures"].items():
        for name, facts in result["methods"].items():
            ratios = result["ratios"].get(name, {})
            cells = [_ratio(ratios.get(key)) for key in ("tau", "decode_tokens_per_second")]
            taus = [number(facts[key], 3) for key in ("tau", "tau_category_mean")]
            rows.append([temperature, name, *taus, number(facts["decode_tokens_per_second"], 1), *cells])
    head = ["temperature", "drafts", "tau", "mean of categories", "tok/s", "times likely's tau", "its tok/s"]
    return table(head, rows)


def _ratio(interval: dict[str, float] | None) -> str:
    if interval is None:
        return ""
    return f"{interval.get('ratio', interval.get('median')):.2f} ({interval['low']:.2f}-{interval['high']:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.drawn_nodes", __doc__, target=BUILT_IN, drafter=None, prompts=PROMPTS, every=1, limit=240,
        max_new_tokens=64, tree=("", "shape of trees, chains are as deep (default: chosen round by round)"),
        temperatures=(["1.0", "0.7", "0.3"], "temperatures"), seed=None, json=None,
    )  # fmt: skip
    return record_main("benchmarks.drawn_nodes", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
