"""Compiles ``kernels.cpp`` once, in seconds, with the machine's own C++ compiler, into the user's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fsd_infer.device.cpuinfo import cpu_flags
from fsd_infer.files import cache_dir

_FLAGS = [
    *("-std=c++17", "-O3", "-mtune=native", "-fopenmp", "-shared", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
]
_TILES = {"amx_tile", "amx_bf16"}

_Library = TypeVar("_Library")

logger = logging.getLogger(__name__)


def build(load: Callable[[Path], _Library]) -> _Library | None:
    """What ``load`` makes of the compiled library; None, with a warning, where it cannot be compiled or loaded."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        logger.warning("no C++ compiler: decoding runs without our CPU kernels, slower. Install g++ to have them.")
        return None
    reason = ""
    for tiles in (True, False) if _TILES <= cpu_flags() else (False,):  # an old compiler or system may know no AMX
        try:
            return load(_compiled(compiler, tiles))
        except (OSError, subprocess.SubprocessError) as error:
            reason = _reason(error)
    logger.warning("our CPU kernels could not be compiled, decoding runs slower without them: %s", reason)
    return None


def _compiled(compiler: str, tiles: bool) -> Path:
    """The shared library, from the cache if the same source was compiled before by the same compiler.

    ``tiles``: for processors with AMX.
    """
    source = Path(__file__).with_name("kernels.cpp").read_bytes()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    flags = [*_FLAGS, *(f"-m{flag.replace('_', '-')}" for flag in sorted(_TILES) if tiles)]
    digest = hashlib.sha256(b"\0".join([source, version, " ".join(flags).encode()])).hexdigest()
    path = cache_dir() / "kernels" / f"{digest[:24]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # renamed at the end: several may compile at once
            made = Path(folder) / path.name
            command = [compiler, *flags, "-x", "c++", "-", "-o", str(made)]
            subprocess.run(command, input=source, capture_output=True, check=True, timeout=300)
            os.replace(made, path)
    return path


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    return output.decode(errors="replace").strip().splitlines()[0] if output else str(error)
