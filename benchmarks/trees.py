"""Which tree: ``--tree auto`` beside fixed trees, on kinds of prompts that take turns.

All trees and rules decode every prompt in turns, in one process. A prompt's rate is new tokens per
second after the prefill; a kind's is the harmonic mean over its prompts, as are those of all prompts (``mixed``).
``oracle`` is the best fixed tree of each prompt, known in hindsight.

Example: python -m benchmarks.trees --target smollm2-135m-maths --json benchmarks/results/trees-smollm2-135m-maths.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import harmonic_mean, quantiles
from typing import Any

from benchmarks.recorded import record_main, settings_of
from fsd_bench import run
from fsd_bench.environment import environment
from fsd_infer.chat.rows import read_jsonl
from fsd_infer.cli.report import number, table
from fsd_infer.drafters.shape import AUTO
from fsd_infer.files import write_text

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "chat": ("writing", "roleplay", "humanities", "stem"),
    "sums": ("math_reasoning", "math"),
    "summaries": ("summarization",),
}
FIXED = "5,6,16;4,3,6;6,2,6,0.3;6,4,9,0.5;8,2,10,0.3;10,2,11,0.2;10,1,11"


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", help="head of the target (default: the one shipped with it)")
    parser.add_argument("--rules", default="exact,tilted", help="(%(default)s)")
    parser.add_argument("--fixed", default=FIXED, help="fixed trees, by semicolons (%(default)s)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--each", type=int, default=5, help="prompts of a kind (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "trees-smollm2-135m.json")
    return parser


def write_interleaved(source: Path, file: Path, each: int) -> Path:
    """``each`` prompts of every kind, the kinds in turns and as their categories."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for _, row in read_jsonl(source):
        for kind, categories in KINDS.items():
            if row["category"] in categories:
                by_kind[kind].append(row["turns"][0])
    spread = {kind: texts[:: max(len(texts) // each, 1)][:each] for kind, texts in by_kind.items()}
    rows = [{"category": kind, "prompt": texts[place]} for place in range(each) for kind, texts in spread.items()]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{"kinds": of the prompts, "rules": {rule: {"rates": {tree: [per prompt]}, "tau": the same, "trees": of auto}}}"""
    names, rules = [*args.fixed.split(";"), AUTO], args.rules.split(",")
    drafter = args.drafter or "shipped"
    methods = {
        (rule, name): f"{rule}@{drafter}" + ("" if name == AUTO else f"@{name.replace(',', 'x')}")
        for rule in rules
        for name in names
    }
    with tempfile.TemporaryDirectory() as directory:
        prompts = write_interleaved(args.prompts, Path(directory) / args.prompts.name, args.each)
        record = run(
            prompts, list(methods.values()), target=args.target, tree=AUTO, max_new_tokens=args.max_new_tokens,
            threads=args.threads, progress=True,
        )  # fmt: skip

    def of(rule: str, value: Callable[[dict[str, Any]], float]) -> dict[str, list[float]]:
        return {
            name: [round(value(row["methods"][methods[rule, name]][0]), 3) for row in record["prompts"]]
            for name in names
        }

    measured = {
        rule: {
            "rates": of(rule, lambda one: (one["answer_tokens"] - 1) / (one["seconds"] - one["prefill_seconds"])),
            "tau": of(rule, lambda one: one["tau"] or 1.0),
            "trees": record["methods"][methods[rule, AUTO]]["trees"],
        }
        for rule in rules
    }
    return {"kinds": [row["category"] for row in record["prompts"]], "rules": measured}


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """{rule: {tree: {kind or "mixed": rate}}} with ``oracle``, and auto / the best fixed tree with 95 % intervals."""
    kinds, summaries = record["kinds"], {}
    for rule, measured in record["rules"].items():
        rates = dict(measured["rates"])
        fixed = [name for name in rates if name != AUTO]
        rates["oracle"] = [max(rates[name][place] for name in fixed) for place in range(len(kinds))]
        places = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in KINDS}
        places["mixed"] = list(range(len(kinds)))
        means = {n: {k: harmonic_mean([r[i] for i in of]) for k, of in places.items()} for n, r in rates.items()}
        against = {}
        for kind, of in places.items():
            best = max(fixed, key=lambda name: means[name][kind])
            draws = random.Random(0)
            ratios = []
            for _ in range(2000):
                drawn = [draws.choice(of) for _ in of]
                ratios.append(
                    harmonic_mean([rates[AUTO][i] for i in drawn]) / harmonic_mean([rates[best][i] for i in drawn])
                )
            ends = quantiles(ratios, n=40)
            against[kind] = {
                "best": best,
                "ratio": means[AUTO][kind] / means[best][kind],
                "interval": [ends[0], ends[-1]],
            }
        summaries[rule] = {"rates": means, "auto_to_best": against}
    return summaries


def report(record: dict[str, Any]) -> str:
    """Tables of rates, and what was chosen."""
    parts = []
    for rule, facts in record["summary"].items():
        columns = ["mixed", *KINDS]
        rows = [[name, *(number(means[kind], 0) for kind in columns)] for name, means in facts["rates"].items()]
        parts.append(table([f"{rule}, tok/s", *columns], rows))
        for kind in columns:
            compared = facts["auto_to_best"][kind]
            low, high = (number(end) for end in compared["interval"])
            parts.append(f"auto / {compared['best']}, {kind}: {number(compared['ratio'])} ({low}-{high})")
        trees = record["rules"][rule]["trees"]
        rounds = sum(trees["nodes"].values())
        shares = ", ".join(f"{nodes}: {100 * count / rounds:.0f} %" for nodes, count in trees["nodes"].items())
        parts.append(f"nodes of auto's trees: {shares}")
        for what, unit in (("tokens", 1), ("seconds", 1000)):
            expected, measured = (unit * trees[key] / rounds for key in (f"expected_{what}", what))
            parts.append(
                f"{what} a round{' (ms)' if unit > 1 else ''}: {expected:.2f} expected, {measured:.2f} measured"
            )
    return "\n".join(parts)


def whole(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record."""
    record = measure(args)
    settings = settings_of(args) | {"prompts": args.prompts.name}
    settings.pop("json")
    return {**record, "summary": summary(record), "settings": settings, "environment": environment(command)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print its tables. 2 after bad input."""
    return record_main("benchmarks.trees", build_parser(), whole, report, argv)


if __name__ == "__main__":
    sys.exit(main())
