"""The CPU backend, for bf16 models and heads on processors with AVX2, and for bf16 through oneDNN on others."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fsd_core.errors import KernelsError
from fsd_infer.backends.base import Backend
from fsd_infer.backends.cpu import functions
from fsd_infer.backends.cpu.head_step import CpuHeadStep
from fsd_infer.backends.cpu.kernels import kernels, loaded
from fsd_infer.backends.cpu.packing import (
    copy_from_files,
    holds_blocks,
    pack_linears,
    pack_stored,
    packed_products,
    unpack,
)
from fsd_infer.backends.cpu.stack import CpuStack
from fsd_infer.targets.stack import Stack, StackOwner
from fsd_infer.targets.weights import warn_once


class CpuBackend(Backend):
    """Compiled kernels, and packed weights through oneDNN. The kernels are compiled when they are first asked for."""

    name = "cpu"

    def __init__(self) -> None:
        functions.register()

    def describe(self) -> str | None:
        compiled = kernels()
        return None if compiled is None else compiled.name

    def report(self) -> tuple[str | None, str]:
        try:
            return self.describe(), loaded().why
        except KernelsError as error:
            return None, str(error)

    def reads_blocks(self, ggml_type: int, rows: int, columns: int) -> bool:
        return holds_blocks(ggml_type, rows, columns)

    def prepare(self, model: nn.Module, release: bool = False, weights: Literal["fp8"] | None = None) -> None:
        devices = {parameter.device.type for parameter in model.parameters()}
        if "cpu" not in devices or devices - {"cpu", "meta"}:  # "meta": released earlier
            return
        stored = pack_stored(model)
        if pack_linears(model, release) or stored:
            _warn_without_kernels()
        if weights == "fp8":
            for packed in packed_products(model):
                packed.quantize()
        if any(parameter.is_meta for parameter in model.parameters()):
            copy_from_files(model)

    def restore(self, model: nn.Module) -> int:
        return unpack(model)

    def stack_for(self, owner: StackOwner) -> Stack:
        return CpuStack.of(owner, CpuHeadStep.of) or owner.plain_stack


def _warn_without_kernels() -> None:
    """Warn why a model runs without our kernels, unless FSD_KERNELS asks for that or a failed build was reported."""
    state = loaded()
    if state.kernels is None and not state.forced and not state.failed:
        warn_once(
            f"decoding runs through torch, and quantised weights are expanded, both slower: {state.why}. Our CPU "
            "kernels need AVX2, as x86-64 processors have since about 2015. See fsd-infer env."
        )
