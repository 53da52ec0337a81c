"""The CUDA backend: Triton between cuBLAS's products for Llama-like models, transformers' layers for others."""

from __future__ import annotations

import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fsd_infer.backends.base import Backend
from fsd_infer.targets.stack import Outputs, Stack, StackInputs, StackOwner

log = logging.getLogger(__name__)


class CudaBackend(Backend):
    """NVIDIA GPUs since Ampere. Without Triton, or with FSD_KERNELS=0, layers and row operations are torch's."""

    name, records = "cuda", True

    def __init__(self) -> None:
        if uses_triton():
            from fsd_infer.backends.cuda import functions  # imports Triton

            functions.register("cuda")

    def describe(self) -> str | None:
        return "triton" if uses_triton() else None

    def report(self) -> tuple[str | None, str]:
        missing = triton_lacks()
        return self.describe(), "Triton is installed" if uses_triton() else missing[0] if missing else "FSD_KERNELS=0"

    def prepare(self, model: nn.Module, release: bool = False, weights: Literal["fp8"] | None = None) -> None:
        """Join products of one input, in place, and attend without copies of keys. Heads keep their dtype."""
        if uses_triton():
            from fsd_infer.backends.cuda import fused, interface, stack

            for group in stack.fusible(model):
                fused.fused(group)
            interface.use(model)

    def restore(self, model: nn.Module) -> int:
        if not uses_triton():
            return 0
        from fsd_infer.backends.cuda import fused, interface, stack

        groups = stack.fusible(model)
        for group in groups:
            fused.unfuse(group)
        interface.leave(model)
        return sum(map(len, groups))

    def stack_for(self, owner: StackOwner) -> Stack:
        plain = WithoutCudnn(owner.plain_stack)
        if not uses_triton():
            return plain
        from fsd_infer.backends.cuda.stack import CudaStack, knows_layers

        return CudaStack(owner, plain) if knows_layers(owner) else plain


@cache
def uses_triton() -> bool:
    """Whether Triton runs here. Says so once if something is missing."""
    if os.environ.get("FSD_KERNELS") == "0":
        return False
    missing = triton_lacks()
    if missing:
        log.warning("%s, so layers run on torch's kernels: %s", *missing)
    return not missing


def triton_lacks() -> tuple[str, str] | None:
    """Return what Triton lacks, and how to get it; None: nothing. It compiles what launches its kernels."""
    if find_spec("triton") is None:
        return "Triton is not installed", "python -m pip install triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler", "install gcc, or name one in CC"
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])  # as Triton
    elsewhere = os.environ.keys() & {"CPATH", "C_INCLUDE_PATH"}  # where the compiler looks, too
    if not elsewhere and not (headers / "Python.h").is_file():
        return f"Triton needs Python's headers, and {headers} has no Python.h", "install python3-dev"
    return None


class WithoutCudnn(Stack):
    """A stack whose attention avoids cuDNN, which compiles a plan for every new length: 10 ms in each forward."""

    def __init__(self, stack: Any) -> None:
        self.stack = stack

    def __call__(self, call: StackInputs) -> Outputs:
        with without_cudnn_attention():
            outputs: Outputs = self.stack(call)
        return outputs

    def captured(self, layers: Sequence[int]) -> Any:
        return self.stack.captured(layers)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Let scaled_dot_product_attention choose among torch's own kernels, and restore the caller's choice afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
