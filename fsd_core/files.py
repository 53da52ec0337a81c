"""Files: atomic writes, reads whose errors name the file, and digests."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import os
import platform
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fsd_core.errors import CheckpointError, DataError, FsdError

log = logging.getLogger(__name__)

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MAX_BYTES = 255, 4095  # of a file's name and of a path, on the usual systems
_MACHINE = f"{zlib.crc32(platform.node().encode()):08x}"  # others number their processes alike


def usable_name(name: str | os.PathLike[str], what: str) -> str:
    """Return ``name`` as text. Raises FsdError, which calls it ``what``, if it cannot name a file or a model."""
    text = os.fspath(name)
    if not isinstance(text, str) or not text:
        raise FsdError(f"{what} {text!r} is not a name: give some text.")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise FsdError(f"{what} {text[:80]!r} is not the name of a file or model: it is not Unicode text.") from None
    if "\0" in text or len(encoded) > MAX_BYTES[1] or max(map(len, encoded.split(b"/"))) > MAX_BYTES[0]:
        raise FsdError(f"{what} {text[:80]!r} is not the name of a file or model: it is too long, or holds a NUL.")
    return text


def cache_dir() -> Path:
    """Return the directory for expanded targets, compiled kernels and measured trees.

    It is $FSD_CACHE, else $XDG_CACHE_HOME/fsd, else ~/.cache/fsd.
    """
    if os.environ.get("FSD_CACHE"):
        return Path(os.path.expanduser(os.environ["FSD_CACHE"]))  # pathlib's expanduser raises without a home
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "fsd"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert disk errors within the block to an OSError that names ``path``, including those of safetensors."""
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
    """Replace numbers that JSON lacks: NaN by None, infinities by "inf" and "-inf"."""
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
    """Append a line of JSON and sync it to disk. Raises OSError, which names ``path``."""
    with disk_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``, and rename it to ``path`` if the block succeeds.

    Readers never see a partial file, several processes may write at once, and an error leaves the old file. What killed
    processes of this machine left of the same file is removed. The file has the permissions of any new file (some
    writers create private ones).

    Raises FsdError if ``path`` is a device, a pipe or a directory, which the rename would replace.
    """
    if path.exists() and not path.is_file():
        raise FsdError(f"{path} is not a file and is not replaced: give another name.")
    partial = path.with_name(f"{partial_prefix(path)}{os.getpid()}-{threading.get_ident()}.partial")
    try:
        with disk_errors(path):
            _remove_left(path)
            partial.touch()
            mode = partial.stat().st_mode
            yield partial
            partial.chmod(mode)
            os.replace(partial, path)
    except OSError as error:
        if error.filename == str(partial):  # a name that nobody gave
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            partial.unlink()


def partial_prefix(path: Path) -> str:
    """Return the start of the names of this machine's partial files of ``path``, which have room for a longer name."""
    return f".{shortened(path.name)}.{_MACHINE}-"


def shortened(name: str) -> str:
    """Return a file's name if it has room for a longer ending, else digits that stand for it."""
    raw = os.fsencode(name)
    return name if len(raw) <= 200 else str(zlib.crc32(raw))


def _remove_left(path: Path) -> None:
    """Remove partial files of ``path`` whose processes are gone."""
    for partial in path.parent.glob(f"{glob.escape(partial_prefix(path))}*-*.partial"):
        process = partial.name.split("-")[-2]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            partial.unlink(missing_ok=True)
        except (OSError, ValueError, OverflowError):  # of another user, or no partial file of ours
            continue


def writable(name: str | os.PathLike[str], what: str, overwrite: bool = True) -> Path:
    """Check a path before long work whose result it will hold, and create its directory.

    Raises FsdError, which calls the file ``what``, if it cannot be written, or holds something and ``overwrite`` is
    false.
    """
    path = Path(usable_name(name, what))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = "it is not a file" if not path.name or path.exists() and not path.is_file() else None
        if problem is None and not os.access(path.parent, os.W_OK | os.X_OK):
            problem = f"{path.parent} is read-only"
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    if problem is not None:
        raise FsdError(f"{what} {os.fspath(name)} cannot be written ({problem}): give another name.")
    if not overwrite and path.exists() and path.stat().st_size:
        raise FsdError(f"{what} {path} is there already: add --overwrite to replace it, or give another name.")
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a value as JSON with a final newline, atomically."""
    write_text(path, json.dumps(value, indent=indent) + "\n")


def parse_text(raw: bytes, where: str, advice: str, error: type[FsdError] = DataError) -> str:
    """Decode UTF-8. Raises ``error``, which names ``where`` and ends in ``advice``, if the bytes are not UTF-8."""
    try:
        return raw.decode("utf-8-sig")  # some programs write a byte order mark
    except UnicodeDecodeError as problem:
        raise error(f"{where}: not UTF-8 ({problem.reason} at byte {problem.start}). {advice}") from problem


def json_text(value: Any) -> str:
    """Return a value as JSON, whose characters stay as they are, unless UTF-8 cannot hold them."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _LONE.search(text) else json.dumps(value)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:60]} is not a number of JSON's, or too large")
    return value


# JSON without NaN and infinities, which Python's own reader lets pass
STRICT_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
_LONE = re.compile("[\ud800-\udfff]")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r:.60} is there twice")
    return values


def parse_json(raw: bytes, where: str, advice: str, error: type[FsdError] = DataError, unique: bool = False) -> Any:
    """Parse JSON in UTF-8.

    Raises ``error``, which names ``where`` and ends in ``advice``, if it is malformed, or ``unique`` and an object has
    a key twice, of which Python would keep the last.
    """
    text = parse_text(raw, where, advice, error)
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as problem:
        line = f"line {problem.lineno} " if problem.lineno > 1 else ""
        reason = f"not JSON ({problem.msg} at {line}column {problem.colno})"
    except RecursionError:
        reason = "JSON nested too deep"
    except ValueError as problem:  # a number with thousands of digits
        reason = f"JSON that cannot be read ({problem})"
    raise error(f"{where}: {reason}. {advice}")


def read_json(path: Path, advice: str, error: type[FsdError] = DataError) -> Any:
    """Read a JSON file. Raises ``error``, which names the file and ends in ``advice``, if it cannot be read."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as problem:  # ValueError: a NUL in its name
        raise error(f"{path}: cannot be read ({problem}). {advice}") from problem
    return parse_json(raw, str(path), advice, error)


@contextmanager
def misshapen(path: Path, advice: str) -> Iterator[None]:
    """Convert what values of other kinds than expected raise within the block to a DataError.

    It names ``path``, the file that the values come from, and ends in ``advice``.
    """
    try:
        yield
    except FsdError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged or of another version ({error!r:.200}). {advice}") from error


def read_weight_map(index: Path, advice: str) -> dict[str, str]:
    """Read ``*.safetensors.index.json``: tensor name -> safetensors file, in the same directory.

    Raises:
        CheckpointError: no such file, or it is malformed; the message ends in ``advice``.
    """
    content = read_json(index, advice, CheckpointError)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{index} is malformed: no weight_map from tensors to files. {advice}")
    for name in files.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r:.120}, which is not a safetensors file next to it. {advice}")
    return files


@contextmanager
def open_safetensors(path: Path, advice: str, error: type[FsdError] = CheckpointError) -> Iterator[Any]:
    """Open a safetensors file for reading. Its slices stay readable after the block.

    Raises ``error``, which names the file and ends in ``advice``, if it is damaged or lacks a requested tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FsdError:
        raise
    except (SafetensorError, OSError, ValueError) as problem:
        raise error(f"{path} is truncated or damaged ({problem}{_cut_off(path)}). {advice}") from problem


def _cut_off(path: Path) -> str:
    """Say which tensors lie beyond the end of a safetensors file whose header is whole; "" if none do."""
    with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size < 1 << 27 else {}
        stored = path.stat().st_size - 8 - size
        ends = {name: part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"}
        lost = sorted(name for name, end in ends.items() if end > stored)
        if lost:
            return f"; cut off: {', '.join(lost[:4])}" + (f" and {len(lost) - 4} more tensors" if lost[4:] else "")
    return ""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, lower-case hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()
