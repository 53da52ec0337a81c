"""Compile ``kernels.cpp`` once, in seconds, with the local C++ compiler, into the user's cache.

A cached library's name holds the digests of its source and flags, of the compiler, and of its own content. The content
is compared with the name before loading, because a damaged library would end the process by a signal.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fsd_infer.device.cpuinfo import cpu_flags
from fsd_infer.files import cache_dir, replacing, sha256_of

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = [
    *("-std=c++17", "-O3", "-mtune=native", "-fopenmp", "-shared", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
]
_TILES = {"amx_tile", "amx_bf16"}
_DIGITS = 32  # hex digits of a library's content digest

_Library = TypeVar("_Library")

logger = logging.getLogger(__name__)


def build(load: Callable[[Path], _Library]) -> _Library | None:
    """Return what ``load`` makes of the compiled library; None, with a warning, if it cannot be compiled or loaded.

    Without a compiler, a cached library of the same source serves, whichever compiler made it.
    """
    reason = ""
    for tiles in (True, False) if _TILES <= cpu_flags() else (False,):  # an old compiler or system may lack AMX
        try:
            return build_for(load, tiles)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            reason = _reason(error)
    logger.warning("decoding runs slower, without our CPU kernels: %s", reason)
    return None


def build_for(load: Callable[[Path], _Library], tiles: bool) -> _Library:
    """Build as :func:`build` does, with or without AMX (``tiles``).

    Raises OSError, AttributeError or SubprocessError if nothing can be compiled or loaded.
    """
    sources = [_SOURCE, *sorted(_SOURCE.with_name("native").glob("*.h"))]
    flags = [*_FLAGS, *(f"-m{flag.replace('_', '-')}" for flag in sorted(_TILES) if tiles)]
    made_of = _digest(*(source.read_bytes() for source in sources), " ".join(flags).encode())
    try:
        command, version = _compiler()
    except (OSError, subprocess.SubprocessError):
        for cached in _whole(f"{made_of}-*.so"):
            return load(cached)
        raise
    name = f"{made_of}-{_digest(version, ' '.join(command).encode())}"
    for cached in _whole(f"{name}-*.so"):
        return load(cached)
    return _compile([*command, *flags], name, load)


def _compiler() -> tuple[list[str], bytes]:
    """Return the compiler's command and version output. Raises OSError or SubprocessError if there is none."""
    named = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if not named:
        raise FileNotFoundError("there is no C++ compiler. Install g++.")
    try:
        command = [named] if shutil.which(named) else shlex.split(named)  # CXX may have arguments
    except ValueError as error:
        raise OSError(f"CXX={named!r} is no command ({error}).") from error
    return command, subprocess.run([*command, "--version"], capture_output=True, check=True, timeout=60).stdout


def _whole(pattern: str) -> list[Path]:
    """Return matching cached libraries whose content has the digest in their name, and delete the others."""
    found = []
    for file in sorted((cache_dir() / "kernels").glob(pattern)):
        with suppress(OSError):
            if sha256_of(file)[:_DIGITS] == file.stem.rpartition("-")[2]:
                found.append(file)
            else:
                file.unlink()
    return found


def _compile(command: list[str], name: str, load: Callable[[Path], _Library]) -> _Library:
    """Compile the kernels, cache the library if the cache is writable, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.so"
        subprocess.run([*command, str(_SOURCE), "-o", str(made)], capture_output=True, check=True, timeout=600)
        cached = cache_dir() / "kernels" / f"{name}-{sha256_of(made)[:_DIGITS]}.so"
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cached) as draft:
                shutil.copyfile(made, draft)
        except OSError as error:
            logger.warning("the compiled CPU kernels cannot be kept for the next process (%s).", error)
            return load(made)
        return load(cached)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _reason(error: Exception) -> str:
    output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[0]) if lines else str(error)
