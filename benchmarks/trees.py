"""Compare ``--tree auto`` with fixed trees, on kinds of prompts that take turns.

    python -m benchmarks.trees --target smollm2-135m-maths --json benchmarks/results/trees-smollm2-135m-maths.json

All trees and rules decode every prompt in turns, in one process. A prompt's rate is new tokens per second after the
prefill. The rate of a kind, and of all prompts (``mixed``), is the harmonic mean over its prompts. ``oracle`` is the
best fixed tree of each prompt, known in hindsight.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from benchmarks.recorded import BUILT_IN, PROMPTS, ROOT, parser_of, record_main, spread
from fsd_bench import run
from fsd_bench.intervals import ratio_interval, ratio_text
from fsd_core.files import write_text
from fsd_core.tables import number, table
from fsd_core.text.rows import read_jsonl
from fsd_infer.trees.shape import AUTO

KINDS = {
    "chat": ("writing", "roleplay", "humanities", "stem"),
    "sums": ("math_reasoning", "math"),
    "summaries": ("summarization",),
}
FIXED = "5,6,16;4,3,6;6,2,6,0.3;6,4,9,0.5;8,2,10,0.3;10,2,11,0.2;10,1,11"


def write_interleaved(source: Path, file: Path, each: int) -> Path:
    """Write ``each`` prompts of every kind, with the kinds in turns and as their categories."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for _, row in read_jsonl(source):
        for kind, categories in KINDS.items():
            if row["category"] in categories:
                by_kind[kind].append(row["turns"][0])
    prompts = {kind: spread(texts, each) for kind, texts in by_kind.items()}
    rows = [{"category": kind, "prompt": texts[index]} for index in range(each) for kind, texts in prompts.items()]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
    return file


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the kinds of the prompts, and for each rule the rates and τ by tree and prompt. Raises FsdError."""
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
            "rates": of(rule, lambda a: (a["answer_tokens"] - 1) / (a["seconds"] - a["prefill_seconds"])),
            "tau": of(rule, lambda a: a["tau"] or 1.0),
            "trees": record["methods"][methods[rule, AUTO]]["trees"],
        }
        for rule in rules
    }
    result = {"kinds": [row["category"] for row in record["prompts"]], "rules": measured}
    return {**result, "summary": summary(result)}


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """Return {rule: {"rates": {tree: {kind: rate}}, "auto_to_best": {kind: auto / the best fixed tree}}}."""
    prompts_of = {kind: [i for i, k in enumerate(record["kinds"]) if k == kind] for kind in KINDS}
    prompts_of = {kind: indices for kind, indices in prompts_of.items() if indices}
    prompts_of["mixed"] = list(range(len(record["kinds"])))
    summaries = {}
    for rule, measured in record["rules"].items():
        fixed = {name: rates for name, rates in measured["rates"].items() if name != AUTO}
        rates = {**measured["rates"], "oracle": [max(of_prompt) for of_prompt in zip(*fixed.values())]}
        means = {
            name: {kind: harmonic_mean([rate[i] for i in indices]) for kind, indices in prompts_of.items()}
            for name, rate in rates.items()
        }
        auto_to_best = {}
        for kind, indices in prompts_of.items():
            best = max(fixed, key=lambda name: means[name][kind])
            # a ratio of harmonic means is one of sums of seconds per token
            auto, best_fixed = ([(1.0, 1 / rates[name][i]) for i in indices] for name in (AUTO, best))
            ratio = ratio_interval(auto, best_fixed)
            auto_to_best[kind] = {"best": best, "ratio": ratio["ratio"], "interval": [ratio["low"], ratio["high"]]}
        summaries[rule] = {"rates": means, "auto_to_best": auto_to_best}
    return summaries


def report(record: dict[str, Any]) -> str:
    """Return tables of rates, and what auto chose."""
    parts = []
    for rule, facts in record["summary"].items():
        columns = list(facts["auto_to_best"])
        rows = [[name, *(number(means[kind], 0) for kind in columns)] for name, means in facts["rates"].items()]
        parts.append(table([f"{rule}, tok/s", *columns], rows))
        for kind, comparison in facts["auto_to_best"].items():
            low, high = comparison["interval"]
            parts.append(f"auto / {comparison['best']}, {kind}: {ratio_text({**comparison, 'low': low, 'high': high})}")
        trees = record["rules"][rule]["trees"]
        rounds = sum(trees["nodes"].values())
        shares = ", ".join(f"{nodes}: {100 * count / rounds:.0f} %" for nodes, count in trees["nodes"].items())
        parts.append(f"nodes of auto's trees: {shares}")
        for what, unit, title in (("tokens", 1, "tokens"), ("seconds", 1000, "milliseconds")):
            expected, measured = (unit * trees[key] / rounds for key in (f"expected_{what}", what))
            parts.append(f"{title} per round: {expected:.2f} expected, {measured:.2f} measured")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the record. Return 2 after bad input."""
    parser = parser_of(
        "benchmarks.trees", __doc__, target=BUILT_IN, drafter=(None, "head of the target (default: the shipped one)"),
        rules="exact,tilted", fixed=(FIXED, "fixed trees, separated by semicolons"), prompts=PROMPTS,
        each=(5, "prompts per kind"), max_new_tokens=64, threads=None,
        json=ROOT / "benchmarks" / "results" / "trees-smollm2-135m.json",
    )  # fmt: skip
    return record_main("benchmarks.trees", parser, measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
