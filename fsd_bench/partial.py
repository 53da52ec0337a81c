"""The rows of a run that is still going, so that a killed one continues where it stopped."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fsd_bench.base import Answer, TimedRun, Turn
from fsd_bench.record import write_record
from fsd_infer.errors import FsdError
from fsd_infer.files import append_json, writable, write_text


class PartialFile:
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
        self.path = self.final.with_name(self.final.name + ".partial.jsonl")
        self.turns: list[Turn] = []
        self.described: dict[str, dict[str, Any]] = {}
        finished = self.final.exists() and self.final.stat().st_size > 0
        if finished and not _is_record(self.final):
            raise FsdError(f"{self.final} is no record of a benchmark and is not overwritten: give another name.")
        if finished and resume and not self.path.exists():
            raise FsdError(f"{self.final} is the record of a finished run: leave --resume out to measure again.")
        try:
            self._begin(settings, resume)
        except OSError as error:
            raise FsdError(f"{self.path} cannot be written ({error.strerror or error}): give another name.") from error

    def _begin(self, settings: dict[str, Any], resume: bool) -> None:
        lines = self.path.read_bytes().decode("utf-8", "replace").split("\n") if self.path.exists() else []
        header = _parse(lines[0]) if lines else None
        if not lines:
            self._restart(settings, [])
            return
        if header is None or not isinstance(header.get("settings"), dict):
            raise FsdError(f"{self.path} does not begin with the settings of a run: delete it.")
        if not resume and len(lines) > 1 and lines[1]:
            raise FsdError(f"{self.path} holds an unfinished run: add --resume to continue it, or delete it.")
        if not resume:  # it ended before its first turn
            self._restart(settings, [])
            return
        stored = header["settings"]
        other = sorted(key for key in {*stored, *settings} if stored.get(key) != settings.get(key))
        if other:
            raise FsdError(
                f"{self.path} was made with other settings ({', '.join(other)}): use the same, or delete the file."
            )
        kept = []
        for line in lines[1:]:
            row = _parse(line)
            try:
                if row is not None and "described" in row:
                    if not _fits(row["described"], dict[str, dict[str, Any]]):
                        break
                    self.described.update(row["described"])
                else:
                    self.turns.append(_turn(row))
            except (TypeError, KeyError, AttributeError):
                break  # a line cut short by the kill; every later turn is measured again
            kept.append(line)
        self._restart(settings, kept)

    def _restart(self, settings: dict[str, Any], lines: list[str]) -> None:
        """Rewrite the file with whole lines only, atomically."""
        write_text(self.path, "\n".join([json.dumps({"settings": settings}), *lines]) + "\n")

    def add(self, turn: Turn) -> None:
        """Append a finished turn; it is on disk when this returns."""
        append_json(self.path, asdict(turn))
        self.turns.append(turn)

    def describe(self, name: str, facts: dict[str, Any]) -> None:
        """Append what a record says about a method."""
        append_json(self.path, {"described": {name: facts}})
        self.described[name] = facts

    def finish(self, record: dict[str, Any]) -> None:
        """Write the record and remove the partial file."""
        write_record(self.final, record)
        self.path.unlink()


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _is_record(file: Path) -> bool:
    """Does the file hold what :meth:`PartialFile.finish` writes?"""
    found = _parse(file.read_bytes().decode("utf-8", "replace"))
    return found is not None and isinstance(found.get("methods"), dict)


def _turn(row: Any) -> Turn:
    """A line's turn. Raises TypeError, KeyError or AttributeError if it holds none."""
    runs = {
        name: _made(TimedRun, {**run, "answers": [_made(Answer, answer) for answer in run["answers"]]})
        for name, run in row["runs"].items()
    }
    turn: Turn = _made(Turn, {**row, "runs": runs})
    return turn


def _made(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass of ``values``. Raises TypeError for values of other types than its fields'."""
    made = kind(**values)
    for name, hint in get_type_hints(kind).items():
        if not _fits(getattr(made, name), hint):
            raise TypeError(f"{name} is no {hint}")
    return made


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
