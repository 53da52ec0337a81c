"""Files that are written whole or not at all, read with errors that name them, and checked by digest."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from fsd_infer.errors import DataError, FsdError


def cache_dir() -> Path:
    """Where expanded targets, compiled kernels and measured trees are kept.

    $FSD_CACHE, else $XDG_CACHE_HOME/fsd, else ~/.cache/fsd.
    """
    if os.environ.get("FSD_CACHE"):
        return Path(os.environ["FSD_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fsd"


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, by one rename, so that no reader sees half of it."""
    draft = path.with_name(path.name + ".partial")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value as JSON and a newline, as :func:`write_text` does."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path, mend: str, error: type[FsdError] = DataError) -> Any:
    """The value a file holds. Raises ``error``, which names the file and ends in ``mend``, if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        raise error(f"{path}:{problem.lineno}: not JSON ({problem.msg}). {mend}") from problem
    except RecursionError as problem:
        raise error(f"{path}: not JSON that is meant to be read (nested too deep). {mend}") from problem
    except (OSError, ValueError) as problem:  # not UTF-8, a number of thousands of digits
        reason = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise error(f"{path}: cannot be read ({reason}). {mend}") from problem


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()
