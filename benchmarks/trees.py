"""Which tree: ``--tree auto`` beside fixed trees, on kinds of prompts that take turns.

All trees decode every prompt one after the other, rules in turns, in one process. A prompt's rate is new tokens per
second after the prefill; a kind's is the harmonic mean over its prompts, as are those of all prompts (``mixed``).
``oracle`` is the best fixed tree of each prompt, known in hindsight.

Example: python -m benchmarks.trees --target smollm2-135m-maths --json benchmarks/results/trees-smollm2-135m-maths.json
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean, quantiles
from typing import Any

import torch

from benchmarks.workplace import shown_command
from fsd_bench.environment import environment
from fsd_bench.record import write_record
from fsd_infer.chat.rows import read_jsonl
from fsd_infer.cli.report import number, table
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters.estimates import Trees
from fsd_infer.drafters.shape import AUTO, parse_tree
from fsd_infer.errors import FsdError

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


def interleaved(path: Path, each: int) -> list[tuple[str, str]]:
    """(kind, first turn) of ``each`` prompts of every kind, the kinds in turns."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for _, row in read_jsonl(path):
        for kind, categories in KINDS.items():
            if row["category"] in categories:
                by_kind[kind].append(row["turns"][0])
    spread = {kind: texts[:: max(len(texts) // each, 1)][:each] for kind, texts in by_kind.items()}
    return [(kind, texts[place]) for place in range(each) for kind, texts in spread.items()]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{rule: {"rates": {tree: [per prompt]}, "tau": the same, "trees": of auto}}, and the kinds of the prompts."""
    torch.set_num_threads(args.threads)
    asked = interleaved(args.prompts, args.each)
    names = [*args.fixed.split(";"), AUTO]
    decoder = FuzzyDecoder.from_pretrained(args.target, args.drafter, tree=parse_tree(names[0]))
    rules = args.rules.split(",")
    drafters = {name: decoder.load_drafter(args.drafter, parse_tree(name)) for name in names}
    measured: dict[str, Any] = {
        rule: {"rates": {n: [] for n in names}, "tau": {n: [] for n in names}} for rule in rules
    }
    chosen = {rule: Trees() for rule in rules}
    nodes: dict[str, list[list[int]]] = {rule: [] for rule in rules}
    for drafter in drafters.values():
        decoder.generate("Good morning.", drafter=drafter, max_new_tokens=2)  # what a process does once
    order = random.Random(0)
    for place, (kind, text) in enumerate(asked):
        print(f"{place + 1}/{len(asked)} {kind}", file=sys.stderr, flush=True)
        for rule in rules:
            for name in order.sample(names, len(names)):
                stats = decoder.generate(
                    text, rule, drafter=drafters[name], max_new_tokens=args.max_new_tokens, temperature=0.0
                ).stats
                seconds = stats.seconds - stats.prefill_seconds
                measured[rule]["rates"][name].append(round((stats.new_tokens - 1) / seconds, 2))
                measured[rule]["tau"][name].append(round(stats.tau, 3))
                if stats.trees is not None:
                    chosen[rule].add(stats.trees)
                    nodes[rule].append(stats.trees.nodes)
    for rule, trees in chosen.items():
        measured[rule]["trees"] = {**trees.to_dict(), "by_prompt": nodes[rule]}
    return {"kinds": [kind for kind, _ in asked], "rules": measured}


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print its tables. 2 after bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(words)
    try:
        record = measure(args)
    except FsdError as error:
        print(f"trees: {error}", file=sys.stderr)
        return 2
    settings = {key: value for key, value in vars(args).items() if key != "json"} | {"prompts": args.prompts.name}
    record |= {"summary": summary(record), "settings": settings}
    write_record(args.json, {**record, "environment": environment(shown_command("benchmarks.trees", words))})
    print(report(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
