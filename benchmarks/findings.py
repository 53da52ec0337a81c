"""Fill in the tables of results from their records, or turn a sweep's file into a record.

    python -m benchmarks.findings                                                  # benchmarks/results/README.md
    python -m benchmarks.findings SWEEP.jsonl benchmarks/results/findings-NAME.json
    python -m benchmarks.findings benchmarks/results/rules-ifeval-odd-rivals.json  # a record's rows compared with exact

A sweep's lines hold whole answers and stay out of the repository. The record holds what the sweep's report shows and
the nats that answers spent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results_page import RESULTS, filled, fresh
from benchmarks.tables import sweep_tables
from fsd_bench.record import write_record
from fsd_bench.sweep.runner import Sweep, read_sweep
from fsd_bench.sweep.summary import summarise
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, misshapen, read_json

ADVICE = "Give a record of `fsd-bench run` with scores and exact, or the file of a sweep and a name for its record."


def record_of(sweep: Sweep) -> dict[str, Any]:
    """Return {"settings", "environment", "temperatures": {temperature: :func:`.summarise` of its answers}}.

    Raises FsdError for a sweep without a prompt that every setting has answered.
    """
    settings = {key: value for key, value in sweep.head["settings"].items() if key != "examples"}
    summaries = {
        f"{run.temperature:g}": summarise(run.comparisons, sweep.settings, settings["seed"])
        for run in sweep.at
        if run.comparisons
    }
    if not summaries:
        raise FsdError("no prompt has been answered under every setting yet: continue the sweep.")
    return {"settings": settings, "environment": sweep.head["environment"], "temperatures": summaries}


def main(argv: Sequence[str] | None = None) -> int:
    """Read the sweep, write the record and print its tables. Return 2 after bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.findings", description=__doc__.split("\n\n")[0])
    parser.add_argument("sweep", type=Path, nargs="?", help="file of `fsd-bench sweep`, or a record of `fsd-bench run`")
    parser.add_argument("record", type=Path, nargs="?", help="file of the sweep's record")
    args = parser.parse_args(argv)
    try:
        if args.sweep is None:
            results = RESULTS / "README.md"
            results.write_text(filled(results.read_text("utf-8")), encoding="utf-8")
            return 0
        if args.record is None:
            with misshapen(args.sweep, ADVICE):
                print(fresh(read_json(args.sweep, ADVICE)))
            return 0
        with misshapen(args.sweep, ADVICE):
            record = record_of(read_sweep(args.sweep))
            tables = sweep_tables(record)
        write_record(args.record, jsonable(record))
        print(tables)
    except (FsdError, OSError) as error:
        print(f"findings: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
