"""What benchmarks share around their measurement: the command line, the record, quiet libraries."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workplace import shown_command
from fsd_bench.record import write_record
from fsd_infer.errors import FsdError


def record_main(
    module: str,
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, Sequence[str]], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Measure, write the record to ``--json``, print its report; returns the exit status.

    Args:
        module: of the command, as ``python -m`` takes it.
        parser: its options, ``--json`` (a path) among them.
        run: (options, command line) -> record. An FsdError that it raises is printed as a line; nothing is written.
        report: record -> text.
        argv: default the process's own.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    quiet_lightning()
    try:
        record = run(args, shown_command(module, words))
    except FsdError as error:
        print(f"{module.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.json, record)
    print(report(record))
    return 0


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Parsed options as a record stores them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def quiet_lightning() -> None:
    """No remarks of Lightning on devices that are not there and the like."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
