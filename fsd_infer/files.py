"""Files that are written whole or not at all, read with errors that name them, and checked by digest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fsd_infer.errors import CheckpointError, DataError, FsdError

MOST_BYTES = 255, 4095  # of a file's name and of a path, on the usual systems


def usable_name(name: str | os.PathLike[str], what: str) -> str:
    """``name`` as text, if it can name a file or a model. Raises FsdError, which calls it ``what``, if it cannot."""
    text = os.fspath(name)
    if not isinstance(text, str) or not text:
        raise FsdError(f"{what} {text!r} is no name: give some text.")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise FsdError(f"{what} {text[:80]!r} is no name of a file or model: it is no Unicode text.") from None
    if "\0" in text or len(encoded) > MOST_BYTES[1] or max(map(len, encoded.split(b"/"))) > MOST_BYTES[0]:
        raise FsdError(f"{what} {text[:80]!r} is no name of a file or model: it is too long, or holds a NUL.")
    return text


def cache_dir() -> Path:
    """Where expanded targets, compiled kernels and measured trees are kept.

    $FSD_CACHE, else $XDG_CACHE_HOME/fsd, else ~/.cache/fsd.
    """
    if os.environ.get("FSD_CACHE"):
        return Path(os.path.expanduser(os.environ["FSD_CACHE"]))  # pathlib's raises an error for users without a home
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "fsd"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full disk within the block as an OSError that names ``path``: Python's names none, safetensors has its own."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def jsonable(value: Any) -> Any:
    """``value`` with numbers that JSON lacks replaced: NaN by null, infinities by "inf" and "-inf"."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def append_json(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON; it is on disk when this returns. Raises OSError, which names ``path``."""
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft beside ``path`` that takes its place, by one rename, if the block ends without an error.

    No reader sees half a file, several processes may write at once, and an error leaves what was there. The file is as
    readable for others as any new one (some writers make private ones).

    Raises FsdError where a device, a pipe or a directory is in the way: a rename would replace it.
    """
    if path.exists() and not path.is_file():
        raise FsdError(f"{path} is no file and is not replaced: give another name.")
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        draft.touch()
        mode = draft.stat().st_mode
        with disk_errors(path):
            yield draft
        draft.chmod(mode)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def writable(name: str | os.PathLike[str], what: str) -> Path:
    """The path of a file that is written when long work is done, checked before: its folder is made.

    Raises FsdError, which calls it ``what``, if it cannot be written.
    """
    path = Path(usable_name(name, what))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = "it is no file" if not path.name or path.exists() and not path.is_file() else None
        if problem is None and not os.access(path.parent, os.W_OK | os.X_OK):
            problem = f"{path.parent} is read-only"
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    if problem is not None:
        raise FsdError(f"{what} {os.fspath(name)} cannot be written ({problem}): give another name.")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 as :func:`replacing` does."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value as JSON and a newline, as :func:`write_text` does."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def parse_json(raw: bytes, where: str, advice: str, error: type[FsdError] = DataError) -> Any:
    """The value that UTF-8 bytes hold. Raises ``error``, which names ``where`` and ends in ``advice``, for others."""
    try:
        return json.loads(raw.decode("utf-8-sig"))  # some programs begin a file with a byte order mark
    except UnicodeDecodeError as problem:
        reason = f"not UTF-8 ({problem.reason} at byte {problem.start})"
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno} " if problem.lineno > 1 else ""
        reason = f"not JSON ({problem.msg} at {line}column {problem.colno})"
    except RecursionError:
        reason = "JSON nested too deep"
    except ValueError as problem:  # a number of thousands of digits
        reason = f"JSON that cannot be read ({problem})"
    raise error(f"{where}: {reason}. {advice}")


def read_json(path: Path, advice: str, error: type[FsdError] = DataError) -> Any:
    """The value a file holds. Raises ``error``, which names the file and ends in ``advice``, if it cannot be read."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as problem:  # ValueError: a NUL in its name
        raise error(f"{path}: cannot be read ({problem}). {advice}") from problem
    return parse_json(raw, str(path), advice, error)


def read_weight_map(index: Path, advice: str) -> dict[str, str]:
    """Tensor name -> safetensors file, as ``*.safetensors.index.json`` has them, all files in its own directory.

    Raises:
        CheckpointError: no such file, or it is malformed; the message ends in ``advice``.
    """
    found = read_json(index, advice, CheckpointError)
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{index} is malformed: no weight_map from tensors to files. {advice}")
    for name in files.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r:.120}, which is no safetensors file beside it. {advice}")
    return files


@contextmanager
def open_safetensors(path: Path, advice: str, error: type[FsdError] = CheckpointError) -> Iterator[Any]:
    """A safetensors file, open for reading. Slices that were taken of it stay readable after the block.

    Raises ``error``, which names the file and ends in ``advice``, if it is damaged or lacks what the block asks for.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FsdError:
        raise
    except (SafetensorError, OSError, ValueError) as problem:
        raise error(f"{path} is truncated or damaged ({problem}). {advice}") from problem


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()
