"""Files of JSON lines that a killed run goes on with: the settings first, then a line for all that is finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsd_infer.errors import FsdError
from fsd_infer.files import append_json, write_text

Line = dict[str, Any]


class LinesFile:
    """Such a file, open for the lines that it lacks.

    Args:
        path: of the file.
        head: first line of a new file; its ``settings`` must be the same for a run to be continued (JSON values).
        existing: what is there, see :func:`whole_lines`; None: the file is written anew.
        advice: what to do where a run with other settings is in the way.

    Attributes:
        lines: what follows the first line.

    Raises:
        FsdError: the settings differ, or the file cannot be written.
    """

    def __init__(self, path: Path, head: Line, existing: list[Line] | None, advice: str) -> None:
        self.path = path
        whole = [head] if existing is None else existing
        stored, settings = whole[0]["settings"], head["settings"]
        other = sorted(key for key in {*stored, *settings} if stored.get(key) != settings.get(key))
        if other:
            raise FsdError(f"{path} was made with other settings ({', '.join(other)}): use the same, or {advice}.")
        with _disk_errors(path):
            write_text(path, "".join(json.dumps(line) + "\n" for line in whole))
        self.lines = whole[1:]

    def append(self, line: Line) -> None:
        """Append a line; it is on disk when this returns."""
        append_json(self.path, line)
        self.lines.append(line)


def whole_lines(path: Path, is_line: Callable[[Any, list[Line]], bool]) -> list[Line] | None:
    """The file's lines up to the first that a kill cut short; None if there is no file, or an empty one.

    ``is_line(value, lines)``: is this the head (``lines`` is empty), or a line of such a run?
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise FsdError(f"{path} is no file: give another name.")
    with _disk_errors(path):
        content = path.read_bytes()
    lines: list[Line] = []
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not is_line(value, lines):
            break
        lines.append(value)
    return lines if content else None


def has(value: Any, kinds: Mapping[str, Any]) -> bool:
    """Is it a JSON object with these fields, of these types?"""
    return isinstance(value, dict) and all(key in value and isinstance(value[key], kind) for key, kind in kinds.items())


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FsdError(f"{path} cannot be written ({error.strerror or error}): give another name.") from error
