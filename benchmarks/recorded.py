"""What the benchmarks share: options, the record and its settings, one-line errors."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.workplace import shown_command
from fsd_bench import run
from fsd_bench.record import write_record
from fsd_core.errors import FsdError
from fsd_core.files import append_json, jsonable, write_text
from fsd_infer.environment import environment

Row = TypeVar("Row")
ROOT = Path(__file__).resolve().parent.parent
BUILT_IN, PROMPTS = "smollm2-135m", ROOT / "data" / "spec_bench_dev.jsonl"
PLACES = ("json", "work", "scratch")  # options that say where files go
PATHS = ("prompts", "figure", "routing", "before", "folder", *PLACES)
HELP = {
    "target": "built-in name, directory or hub id",
    "drafter": "what `--drafter` of `fsd-infer` takes",
    "rules": "acceptance rules, separated by commas",
    "prompts": "file of prompts",
    "limit": "number of prompts",
    "every": "take every N-th row of the file",
    "max_new_tokens": "new tokens per answer",
    "batch": "prompts per call",
    "temperature": "0 is greedy",
    "seed": "seed of draws and of the bootstrap",
    "repeat": "runs per prompt",
    "blocks": "blocks of prompts; each method answers a block in its own process",
    "threads": "torch threads",
    "json": "file of the record",
    "raw": "continue the prompts without the chat template",
}


def parser_of(module: str, text: str | None, **options: Any) -> argparse.ArgumentParser:
    """Make the parser of ``python -m module``.

    Args:
        module: name of the module.
        text: its docstring, whose first paragraph describes the command.
        options: default of each option, or (default, help) where :data:`HELP` has none. The default's type is that of
            the option. ``...`` makes it required, a list takes several values, ``False`` makes a flag.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(text or "").split("\n\n")[0])
    for name, value in options.items():
        default, help_text = value if isinstance(value, tuple) else (value, HELP[name])
        flag = f"--{name.replace('_', '-')}"
        kind: Any = Path if name in PATHS else int if name in ("limit", "every", "threads") else str
        if default is False:
            parser.add_argument(flag, action="store_true", help=help_text)
        elif default is ... or default is None:
            parser.add_argument(flag, type=kind, required=default is ..., help=help_text)
        elif isinstance(default, list):
            help_text += f" (default: {' '.join(map(str, default))})"
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=help_text)
        else:
            kind = Path if isinstance(default, Path) else type(default)
            parser.add_argument(flag, type=kind, default=default, help=f"{help_text} (default: %(default)s)")
    return parser


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` of the rows, evenly spread."""
    return list(rows[:: max(len(rows) // count, 1)][:count]) if count else []


def run_resumed(prompts: Path | str, methods: Sequence[str], file: Path | None, **options: Any) -> dict[str, Any]:
    """Run :func:`fsd_bench.run` with a progress bar, and continue the unfinished run of ``file`` if there is one."""
    partial = file and file.with_name(file.name + ".partial.jsonl")
    resume = partial is not None and partial.exists()
    return run(prompts, methods, json_path=file, resume=resume, overwrite=True, progress=True, **options)


class Finished(dict[str, Any]):
    """Parts of a benchmark by name. Those of a stopped run are there again when the same command is repeated.

    Args:
        file: file of the record; until it is written, parts are kept in FILE.partial.jsonl. None: nothing is kept.
        settings: what the parts depend on besides their names; those of other settings do not count.
    """

    def __init__(self, file: Path | None, settings: Any = None) -> None:
        self._file = file and file.with_name(file.name + ".partial.jsonl")
        self._settings = jsonable(settings)
        if self._file is not None and self._file.exists():
            complete, newline, torn = self._file.read_text("utf-8").rpartition("\n")
            if torn:  # by a kill
                write_text(self._file, complete + newline)
            rows = map(json.loads, complete.splitlines())
            super().update({row["name"]: row["part"] for row in rows if row["settings"] == self._settings})

    def __setitem__(self, name: str, part: Any) -> None:
        super().__setitem__(name, part)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            append_json(self._file, {"name": name, "settings": self._settings, "part": jsonable(part)})

    def remove(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def record_main(
    module: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    argv: Sequence[str] | None = None,
) -> int:
    """Measure, print a report, and write the record to ``--json`` if that is given.

    The record gains ``settings`` and ``environment`` unless ``measure`` returns its own.

    Args:
        module: name of the module, for the command line in the record.
        parser: options of the command, ``--json`` among them.
        measure: returns the record. An FsdError is printed as one line, and nothing is written.
        report: returns the text that is printed.
        argv: the options; default: this process's.

    Returns:
        0, or 2 after an FsdError.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    facts = {"settings": settings_of(args), "environment": environment(shown_command(module, words))}
    if args.json is not None:
        args.json = args.json.resolve()
    try:
        record = {**facts, **measure(args)}
    except FsdError as error:
        print(f"{module.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_record(args.json, jsonable(record))
        Finished(args.json).remove()
    print(report(record))
    return 0


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options as a record stores them: models and files by the last part of their path."""
    return {name: _named(value) for name, value in vars(args).items() if name not in PLACES}


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(item) for item in value]
    path = isinstance(value, Path) or isinstance(value, str) and "/" in value and Path(value).exists()
    return Path(value).name if path else value
