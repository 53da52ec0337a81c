"""The file of a sweep: JSON lines, the settings first, then one per finished answer. A killed run appends to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsd_bench.base import OF_TEXT
from fsd_infer.errors import FsdError
from fsd_infer.files import append_json, usable_name, writable, write_text
from fsd_infer.rules import Source

VERSION = 2
_NUMBER = (int, float)
_HEAD = {"settings": dict, "families": dict, "rule_facts": dict, "prompts": list, "environment": dict}
_PLACE = {"temperature": _NUMBER, "prompt": int, "repeat": int, "setting": str}  # which line it is
_ANSWER = {
    **dict.fromkeys(("seconds", "prefill_seconds", "gate_open_fraction", "gate_accepted_fraction"), _NUMBER),
    **dict.fromkeys(("tokens", "rounds", "spent"), list), **dict.fromkeys(("sources", "finish_reason", "text"), str),
    "target_forwards": int, "divergence_spent": (*_NUMBER, str),
    **dict.fromkeys(("log_likelihood", *OF_TEXT), (*_NUMBER, type(None))),
    "final": (str, type(None)),
}  # fmt: skip
_SOURCES = {str(int(source)) for source in Source}


class SweepFile:
    """A sweep's file, open for the lines that it lacks.

    A line that a kill cut short is dropped. What was measured with other settings is never mixed in or overwritten.

    Args:
        path: of the file; its folder is made.
        settings: what must be the same for a run to be continued (JSON values).
        facts: about the run, stored beside the settings of a new file.

    Attributes:
        lines: what follows the first line.

    Raises:
        FsdError: another file is in the way, one that was made with other settings, or one that cannot be written.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        self.path = writable(path, "the sweep's file")
        self.lines: list[dict[str, Any]] = []
        try:
            whole = _whole_lines(self.path)
            if whole is None:
                write_text(self.path, json.dumps({"sweep": VERSION, "settings": settings, **facts}) + "\n")
                return
            head, *rest = whole
            stored = head["settings"]
            other = sorted(key for key in {*stored, *settings} if stored.get(key) != settings.get(key))
            if other:
                raise FsdError(
                    f"{self.path} was made with other settings ({', '.join(other)}): use the same, or another name."
                )
            self.lines = rest
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in whole))
        except OSError as error:
            raise FsdError(f"{self.path} cannot be written ({error.strerror or error}): give another name.") from error

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; it is on disk when this returns."""
        append_json(self.path, line)
        self.lines.append(line)


def read_lines(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(first line, other lines) of a sweep's file, finished or not. Raises FsdError if it is none."""
    found = _whole_lines(Path(usable_name(path, "the sweep's file")))
    if found is None:
        raise FsdError(f"{path} holds no sweep: there is nothing to report.")
    return found[0], found[1:]


def _whole_lines(path: Path) -> list[dict[str, Any]] | None:
    """The file's lines up to the first that is cut short; None if there is no file, or an empty one."""
    if not path.exists():
        return None
    if not path.is_file():
        raise FsdError(f"{path} is no file: give another name.")
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if isinstance(value, dict) and value.get("setting") == "distances":  # earlier versions wrote such lines
            continue
        if not (_is_line(value, found[0]) if found else _has(value, {"sweep": int})):
            break
        found.append(value)
    if not found and not path.stat().st_size:
        return None
    if not found or found[0]["sweep"] != VERSION or not _has(found[0], _HEAD):
        raise FsdError(f"{path} is no file of a sweep and is not overwritten: give another name.")
    return found


def _has(value: Any, kinds: Mapping[str, Any]) -> bool:
    return isinstance(value, dict) and all(key in value and isinstance(value[key], kind) for key, kind in kinds.items())


def _is_line(value: Any, head: dict[str, Any]) -> bool:
    """Is this what a sweep writes, of a prompt and a temperature of its own?"""
    if not _has(value, _PLACE) or not _has(head, _HEAD):
        return False
    known = 0 <= value["prompt"] < len(head["prompts"])
    known &= value["temperature"] in (head["settings"].get("temperatures") or ())
    return known and _has(value, _ANSWER) and set(value["sources"]) <= _SOURCES
