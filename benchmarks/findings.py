"""Turn a sweep's file into a record and Markdown tables: settings beside exact decoding, random gates among them.

    python -m benchmarks.findings SWEEP.jsonl benchmarks/results/findings-NAME.json
    python -m benchmarks.findings benchmarks/results/rules-ifeval-odd-rivals.json

The sweep's lines hold whole answers and stay out of the repository. The record holds what the sweep's report shows and
the nats that answers spent. The tables are those of docs/ladder.md. With a record of `fsd-bench run` alone, its rows
for the table of docs/findings.md are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsd_bench.evidence.settings import EXACT
from fsd_bench.evidence.summary import summarise
from fsd_bench.evidence.sweep import Sweep, read_sweep
from fsd_bench.record import write_record
from fsd_core.errors import FsdError
from fsd_core.files import jsonable

RATIOS = {"× τ": "tau", "forwards ×": "target_forwards", "length ×": "answer_tokens", "speed ×": "speed"}
DIFFERENCES = {  # heading: quantity, scale, digits
    "score, points": ("score", 100, 0), "log-likelihood": ("log_likelihood_per_token", 1, 3),
    "copied 4-grams, points": ("copied_4grams", 100, 1), "repeated 4-grams, points": ("repeated_4grams", 100, 1),
}  # fmt: skip


def record_of(sweep: Sweep) -> dict[str, Any]:
    """Return {"settings", "environment", "temperatures": {temperature: :func:`.summarise` of its answers}}."""
    settings = {key: value for key, value in sweep.head["settings"].items() if key != "examples"}
    found = {
        f"{at.temperature:g}": summarise(at.turns, sweep.settings, settings["seed"]) for at in sweep.at if at.turns
    }
    return {"settings": settings, "environment": sweep.head["environment"], "temperatures": found}


def tables(record: dict[str, Any]) -> str:
    """Return a Markdown table per temperature with each setting's ratios to exact and its differences from it."""
    headers = ["rule", *RATIOS, *DIFFERENCES, "nats per answer"]
    parts = []
    for temperature, settings in record["temperatures"].items():
        exact = settings[EXACT]
        score = exact["means"].get("score")
        lines = [f"Temperature {temperature}, `{EXACT}`: {exact['tau']:.2f} tokens per forward."]
        if score is not None:
            mean, low, high = (f"{100 * score[key]:.0f}" for key in ("mean", "low", "high"))
            lines[0] = f"{lines[0][:-1]}, score {mean} % ({low}–{high})."
        lines += ["", "| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
        for name, facts in settings.items():
            if name != EXACT:
                cells = [_ratio(facts["ratios"].get(key)) for key in RATIOS.values()]
                cells += [_difference(facts["differences"].get(key), *form) for key, *form in DIFFERENCES.values()]
                cells.append(f"{facts['nats_per_answer']['mean']:.1f}")
                lines.append(f"| `{name}` | " + " | ".join(cells).replace("-", "−") + " |")
        parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def beside_exact(record: dict[str, Any]) -> str:
    """Return a row per rule of a record of `fsd-bench run`: τ, score, flips, ends and repeats beside exact."""
    rows = []
    for name, less in record["differences"][EXACT].items():
        ratios, facts, flips = record["ratios"][EXACT][name], record["methods"][name], record["flips"][EXACT][name]
        kept = "{:.0f} % ({:.0f}–{:.0f})".format(*(100 * ratios["retention"][key] for key in ("ratio", "low", "high")))
        points = [_difference(less[key], 100, 1) for key in ("score", "finished_fraction", "repeated_4grams")]
        points = [text.replace("-", "−") for text in points]
        nats = facts["divergence_spent"] / facts["answer_tokens"]
        lost = f"{flips['lost']}, {flips['gained']}"
        rows.append([f"`{name}`", _ratio(ratios["tau"]), points[0], kept, lost, *points[1:], f"{nats:.3f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _ratio(values: dict[str, float] | None) -> str:
    return "–" if values is None else "{ratio:.2f} ({low:.2f}–{high:.2f})".format(**values)


def _difference(values: dict[str, float] | None, scale: float, digits: int) -> str:
    if values is None:
        return "–"
    mean, low, high = (f"{scale * values[key]:+.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def main(argv: Sequence[str] | None = None) -> int:
    """Read the sweep, write the record and print its tables. Return 2 after bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.findings", description=__doc__.split("\n\n")[0])
    parser.add_argument("sweep", type=Path, help="file of `fsd-bench sweep`, or a record of `fsd-bench run`")
    parser.add_argument("record", type=Path, nargs="?", help="file of the sweep's record")
    args = parser.parse_args(argv)
    try:
        if args.record is None:
            print(beside_exact(json.loads(args.sweep.read_text("utf-8"))))
            return 0
        record = record_of(read_sweep(args.sweep))
        write_record(args.record, jsonable(record))
        print(tables(record))
    except FsdError as error:
        print(f"findings: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
