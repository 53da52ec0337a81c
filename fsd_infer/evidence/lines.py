"""The file of a sweep: JSON lines, the settings first, then one per finished answer. A killed run appends to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fsd_infer.errors import FsdError
from fsd_infer.files import usable_name, write_text

VERSION = 1
KEYS = {"temperature", "prompt", "repeat", "setting"}  # that say which line it is


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
        self.path = Path(usable_name(path, "the sweep's file"))
        self.lines: list[dict[str, Any]] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
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
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
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
        if not isinstance(value, dict) or (found and not KEYS <= value.keys()):
            break
        found.append(value)
    if not found and not path.stat().st_size:
        return None
    if not found or found[0].get("sweep") != VERSION:
        raise FsdError(f"{path} is no file of a sweep and is not overwritten: give another name.")
    return found
