"""CPU speed without touching modelling code: bf16 linear layers with weights in oneDNN's own layout.

An unpacked bf16 weight is reordered in every call; packed once, a linear layer over a few tokens takes half the time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def can_pack() -> bool:
    """Does this build and machine run bf16 matrix products through oneDNN?"""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class _Packed:
    """A linear layer's forward through its packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)
        self.bias = linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> int:
    """Replace the forward of every bf16 CPU ``nn.Linear`` in ``module`` by a packed one; returns how many.

    Weights stay where they are (tied weights and ``state_dict`` are untouched); the packed copy is extra memory.
    Results agree with the plain layer's within bf16 rounding. Does nothing where oneDNN has no bf16.
    """
    if not can_pack():
        return 0
    count = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
            setattr(layer, "forward", _Packed(layer))  # noqa: B010 - an instance attribute, seen before the method
            count += 1
    return count
