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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fsd_core.files import cache_dir, replacing, sha256_of

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ["-std=c++17", "-O3", "-mtune=native", "-fopenmp", "-shared", "-fPIC", "-mfma"]
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"]
_MORE = {
    "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "avx512": _AVX512,
    "avx2": ["-mavx2", "-mf16c", "-mpopcnt"],
}
_DIGITS = 32  # hex digits of a library's content digest

_Library = TypeVar("_Library")

logger = logging.getLogger(__name__)


def build(load: Callable[[Path], _Library], names: Sequence[str]) -> tuple[_Library | None, str]:
    """Return what ``load`` makes of the first set of kernels that can be compiled and loaded.

    Without a compiler, a cached library of the same source serves, whichever compiler made it.

    Args:
        load: makes something of a compiled library's path.
        names: sets of kernels, best first. An old compiler or system may lack AMX.

    Returns:
        What was made, or None. Second, why the sets before it, or all sets, failed: "" if none did.
    """
    failed: list[str] = []
    for name in names:
        try:
            return build_for(load, name), "; ".join(failed)
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            failed.append(f"{name}: {_reason(error)}")
    return None, "; ".join(failed)


def build_for(load: Callable[[Path], _Library], name: str) -> _Library:
    """Build one set of kernels as :func:`build` does.

    Raises OSError, AttributeError or SubprocessError if it cannot be compiled or loaded.
    """
    sources = [_SOURCE, *sorted(_SOURCE.with_name("native").glob("*.h"))]
    flags = [*_FLAGS, *_MORE[name]]
    made_of = _digest(*(source.read_bytes() for source in sources), " ".join(flags).encode())
    try:
        command, version = compiler()
    except (OSError, subprocess.SubprocessError):
        for cached in _intact(f"{made_of}-*.so"):
            return load(cached)
        raise
    stem = f"{made_of}-{_digest(version, ' '.join(command).encode())}"
    for cached in _intact(f"{stem}-*.so"):
        return load(cached)
    return _compile([*command, *flags], stem, load)


def compiler() -> tuple[list[str], bytes]:
    """Return the compiler's command and version output. Raises OSError or SubprocessError if there is none."""
    named = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if not named:
        raise FileNotFoundError("there is no C++ compiler. Install g++.")
    try:
        command = [named] if shutil.which(named) else shlex.split(named)  # CXX may have arguments
    except ValueError as error:
        raise OSError(f"CXX={named!r} is not a command ({error}).") from error
    return command, subprocess.run([*command, "--version"], capture_output=True, check=True, timeout=60).stdout


def compiler_line() -> str:
    """Return the compiler's command and the first line of its version, or why there is none."""
    try:
        command, version = compiler()
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {error}"
    return f"{shlex.join(command)}: {version.decode(errors='replace').partition(chr(10))[0]}"


def _intact(pattern: str) -> list[Path]:
    """Return matching cached libraries whose content has the digest in their name, and delete the others."""
    libraries = []
    for file in sorted((cache_dir() / "kernels").glob(pattern)):
        with suppress(OSError):
            if sha256_of(file)[:_DIGITS] == file.stem.rpartition("-")[2]:
                libraries.append(file)
            else:
                file.unlink()
    return libraries


def _compile(command: list[str], stem: str, load: Callable[[Path], _Library]) -> _Library:
    """Compile the kernels, cache the library if the cache is writable, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        subprocess.run([*command, str(_SOURCE), "-o", str(library)], capture_output=True, check=True, timeout=600)
        cached = cache_dir() / "kernels" / f"{stem}-{sha256_of(library)[:_DIGITS]}.so"
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cached) as draft:
                shutil.copyfile(library, draft)
        except OSError as error:
            logger.warning("the compiled CPU kernels cannot be kept for the next process (%s).", error)
            return load(library)
        return load(cached)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _reason(error: Exception) -> str:
    output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
    lines = output.splitlines()
    return next((line for line in lines if "error" in line), lines[0]) if lines else str(error)
