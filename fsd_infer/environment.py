"""Describe the machine and the software of a measurement: versions, processor, threads, commit."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fsd_infer import __version__
from fsd_infer.backends.choose import choose
from fsd_infer.device.cpuinfo import processor


def environment(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a record stores about machine and software. ``cpu_kernels`` is the set of kernels, None for none.

    Args:
        command: command line. Default: this process's, with the program's name without its path.
    """
    words = list(command) if command is not None else [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "fsd_infer": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": processor("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": choose("cpu").report()[0],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "commit": commit(),
        "command": shlex.join(words),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Return the commit of this package's repository, with "-dirty" if files differ; None outside a repository."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
