"""The file of a sweep: JSON lines, the settings first, then one per finished answer. A killed run appends to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsd_bench.base import OF_TEXT
from fsd_bench.lines import LinesFile, has, whole_lines
from fsd_infer.errors import FsdError
from fsd_infer.files import usable_name, writable
from fsd_infer.rules import Source

VERSION = 2
_NUMBER = (int, float)
_HEAD = {"sweep": int, "settings": dict, "families": dict, "rule_facts": dict, "prompts": list, "environment": dict}
_PLACE = {"temperature": _NUMBER, "prompt": int, "repeat": int, "setting": str}  # which line it is
_ANSWER = {
    **dict.fromkeys(("seconds", "prefill_seconds", "gate_open_fraction", "gate_accepted_fraction"), _NUMBER),
    **dict.fromkeys(("tokens", "rounds", "spent"), list), **dict.fromkeys(("sources", "finish_reason", "text"), str),
    "target_forwards": int, "divergence_spent": (*_NUMBER, str),
    **dict.fromkeys(("log_likelihood", *OF_TEXT), (*_NUMBER, type(None))),
    "final": (str, type(None)),
}  # fmt: skip
_SOURCES = {str(int(source)) for source in Source}


class SweepFile(LinesFile):
    """A sweep's file, open for the lines that it lacks.

    A line that a kill cut short is dropped. What was measured with other settings is never mixed in or overwritten.

    Args:
        path: of the file; its folder is made.
        settings: what must be the same for a run to be continued (JSON values).
        facts: about the run, stored beside the settings of a new file.

    Raises:
        FsdError: another file is in the way, one that was made with other settings, or one that cannot be written.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], facts: dict[str, Any]) -> None:
        file, head = writable(path, "the sweep's file"), {"sweep": VERSION, "settings": settings, **facts}
        super().__init__(file, head, _sweep_lines(file), "another name")


def read_lines(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(first line, other lines) of a sweep's file, finished or not. Raises FsdError if it is none."""
    lines = _sweep_lines(Path(usable_name(path, "the sweep's file")))
    if lines is None:
        raise FsdError(f"{path} holds no sweep: there is nothing to report.")
    return lines[0], lines[1:]


def _sweep_lines(path: Path) -> list[dict[str, Any]] | None:
    lines = whole_lines(path, _is_line)
    if lines == []:
        raise FsdError(f"{path} is no file of a sweep and is not overwritten: give another name.")
    # earlier versions wrote lines of distances too
    return lines and [line for line in lines if line.get("setting") != "distances"]


def _is_line(value: Any, earlier: list[dict[str, Any]]) -> bool:
    """Is this what a sweep writes, of a prompt and a temperature of its own?"""
    if not earlier:
        return has(value, _HEAD) and value["sweep"] == VERSION
    if not has(value, _PLACE):
        return False
    known = 0 <= value["prompt"] < len(earlier[0]["prompts"])
    known &= value["temperature"] in (earlier[0]["settings"].get("temperatures") or ())
    if value["setting"] == "distances":
        return known
    return known and has(value, _ANSWER) and set(value["sources"]) <= _SOURCES
