"""Joins records of `benchmarks.compare_losses` that differ in their arms alone, and compares all arms anew.

Run: python -m benchmarks.join_losses FIRST.json MORE.json --json benchmarks/results/losses.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare_losses import write_record
from benchmarks.equal_divergence import gather, summarise
from fsd_infer.errors import DataError, FsdError

SAME = ("model", "data", "trainer", "evaluation", "seeds")


def join(records: Sequence[Mapping[str, Any]], order: Sequence[str] = ()) -> dict[str, Any]:
    """One record of all arms.

    Args:
        records: as `compare_losses` writes them; baselines are the first one's.
        order: of the arms in the tables; default as they come.

    Raises:
        DataError: they were trained or judged differently, or an arm occurs twice.
    """
    first, *others = records
    for number, other in enumerate(others, start=2):
        differ = [key for key in SAME if other["settings"][key] != first["settings"][key]]
        differ += ["the answers or features"] if other["data_sha256"] != first["data_sha256"] else []
        if differ:
            raise DataError(f"record {number} cannot be joined with the first: they differ in {', '.join(differ)}.")
    arms = {arm["name"]: arm for record in records for arm in record["settings"]["arms"]}
    if len(arms) < sum(len(record["settings"]["arms"]) for record in records):
        raise DataError("an arm occurs in two records: join records of different arms.")
    unknown = sorted(set(order) - set(arms))
    if unknown:
        raise DataError(f"no record has the arm {', '.join(unknown)}; there are {', '.join(arms)}.")
    names = [*order, *(name for name in arms if name not in order)]
    results = [row for record in records for row in record["results"]]
    counts = gather({(row["arm"], row["seed"], row["rule"]): row["counts"] for row in results}, names)
    return {
        **first,
        "environment": {**first["environment"], "joined": [record["environment"] for record in records]},
        "settings": {**first["settings"], "arms": [arms[name] for name in names]},
        "complete": all(record["complete"] for record in records),
        "runs": [run for record in records for run in record["runs"]],
        "summary": None
        if counts is None
        else summarise(counts, first["settings"]["baselines"], first["settings"]["evaluation"]["seed"]),
        "results": results,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Read, join, write. 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.join_losses", description=__doc__.split("\n\n")[0])
    parser.add_argument("records", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--order", metavar="A,B", help="arms in the order of the tables")
    parser.add_argument(
        "--json", type=Path, required=True, metavar="FILE", help="the record; .md and .png lie beside it"
    )
    args = parser.parse_args(argv)
    try:
        record = join([_read(path) for path in args.records], args.order.split(",") if args.order else ())
    except FsdError as error:
        print(f"join_losses: {error}", file=sys.stderr)
        return 2
    write_record(record, args.json)
    print(args.json.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"settings", "data_sha256", "runs", "results", "environment", "complete"} - set(record)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is no record of compare_losses ({error}).") from None
    if missing:
        raise DataError(f"{path} is no record of compare_losses: it has no {', '.join(sorted(missing))}.")
    return record


if __name__ == "__main__":
    sys.exit(main())
