"""The rows of a run that is still going, so that a killed one continues where it stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fsd_bench.base import Answer, TimedRun, Turn
from fsd_bench.lines import LinesFile, has, whole_lines
from fsd_bench.record import write_record
from fsd_infer.errors import FsdError
from fsd_infer.files import writable


class PartialFile(LinesFile):
    """``FILE.partial.jsonl``: a line of settings, then one line per finished turn, or per description of methods.

    Args:
        path: the record's own path; the partial file lies beside it.
        settings: what must be the same for a run to be continued (JSON values).
        resume: continue; otherwise an unfinished run is an error, so that it is not lost by accident.

    Raises:
        FsdError: a file of another kind is in the way, the directory cannot be written, an unfinished run is there and
            ``resume`` is not set, a finished one and it is, or an unfinished one was made with other settings.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], resume: bool) -> None:
        self.final = writable(path, "the record")
        partial = self.final.with_name(self.final.name + ".partial.jsonl")
        finished = self.final.exists() and self.final.stat().st_size > 0
        if finished and not _is_record(self.final):
            raise FsdError(f"{self.final} is no record of a benchmark and is not overwritten: give another name.")
        if finished and resume and not partial.exists():
            raise FsdError(f"{self.final} is the record of a finished run: leave --resume out to measure again.")
        existing = whole_lines(partial, _is_line)
        if existing == []:
            raise FsdError(f"{partial} does not begin with the settings of a run: delete it.")
        if existing is not None and not resume:
            if partial.read_bytes().partition(b"\n")[2]:
                raise FsdError(f"{partial} holds an unfinished run: add --resume to continue it, or delete it.")
            existing = None  # it ended before its first turn
        super().__init__(partial, {"settings": settings}, existing, "delete the file")
        self.turns = [_turn(line) for line in self.lines if "described" not in line]
        self.described: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            self.described.update(line.get("described", {}))

    def add(self, turn: Turn) -> None:
        """Append a finished turn; it is on disk when this returns."""
        self.append(asdict(turn))
        self.turns.append(turn)

    def describe(self, name: str, facts: dict[str, Any]) -> None:
        """Append what a record says about a method."""
        self.append({"described": {name: facts}})
        self.described[name] = facts

    def finish(self, record: dict[str, Any]) -> None:
        """Write the record and remove the partial file."""
        write_record(self.final, record)
        self.path.unlink()


def _is_line(value: Any, earlier: list[dict[str, Any]]) -> bool:
    if not earlier:
        return has(value, {"settings": dict})
    if has(value, {"described": dict}):
        return _fits(value["described"], dict[str, dict[str, Any]])
    try:
        _turn(value)
    except (TypeError, KeyError, AttributeError):
        return False
    return True


def _is_record(file: Path) -> bool:
    """Does the file hold what :meth:`PartialFile.finish` writes?"""
    try:
        return has(json.loads(file.read_bytes()), {"methods": dict})
    except (ValueError, RecursionError):
        return False


def _turn(row: Any) -> Turn:
    """A line's turn. Raises TypeError, KeyError or AttributeError if it holds none."""
    runs = {
        name: _checked(TimedRun, {**run, "answers": [_checked(Answer, answer) for answer in run["answers"]]})
        for name, run in row["runs"].items()
    }
    turn: Turn = _checked(Turn, {**row, "runs": runs})
    return turn


def _checked(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass of ``values``. Raises TypeError for values of other types than its fields'."""
    instance = kind(**values)
    for name, hint in get_type_hints(kind).items():
        if not _fits(getattr(instance, name), hint):
            raise TypeError(f"{name} is no {hint}")
    return instance


def _fits(value: Any, hint: Any) -> bool:
    """Is this a value of the annotated type? For numbers, texts, dataclasses, and lists, dicts and unions of them."""
    inner = get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if inner:
        return any(_fits(value, each) for each in inner)
    return hint is Any or type(value) is hint or (hint is float and type(value) is int)
