"""CPU speed without touching modelling code: bf16 linear layers with weights in oneDNN's own layout.

An unpacked bf16 weight is reordered in every call; packed once, a linear layer over a few tokens takes half the time.
:func:`speed_up` does this and :mod:`fsd_infer.fuse`'s replacements; :func:`restore` undoes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def can_pack() -> bool:
    """Does this build and machine run bf16 matrix products through oneDNN?"""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Replacement:
    """A module's forward by other means, put on the instance. Its class, its weights and its hooks stay.

    Attributes:
        covered: linear layers whose products it makes itself, so that nobody else needs to pack them.
    """

    covered: tuple[nn.Module, ...] = ()

    def put_on(self, module: nn.Module) -> None:
        setattr(module, "forward", self)  # noqa: B010 - an instance attribute, seen before the method


def is_replaced(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Replacement)


def restore(module: nn.Module) -> int:
    """Give every module in ``module`` its own forward back; returns how many had another."""
    replaced = [part for part in module.modules() if is_replaced(part)]
    for part in replaced:
        delattr(part, "forward")
    return len(replaced)


class Packed(Replacement):
    """x [..., in] -> x Wᵀ + b through the packed weight of one linear layer, or of several side by side."""

    def __init__(self, *linears: nn.Linear) -> None:
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        # .default: the overload itself, which Python reaches faster than the operator that chooses among overloads
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


def through(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layer packed, or the layer itself where that cannot be."""
    return Packed(layer) if is_packable([layer]) else layer  # type: ignore[arg-type]


def is_packable(linears: Sequence[nn.Module]) -> bool:
    """Can :class:`Packed` stand for these layers: plain bf16 linear layers on a CPU, with a bias all or none?"""
    return (
        can_pack()
        and all(
            type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu"
            for layer in linears
        )
        and len({layer.bias is None for layer in linears}) == 1
    )


def pack_linears(module: nn.Module) -> int:
    """Replace the forward of every bf16 CPU ``nn.Linear`` in ``module`` by a packed one; returns how many.

    Weights stay where they are (tied weights and ``state_dict`` are untouched); the packed copy is extra memory.
    Results agree with the plain layer's within bf16 rounding. Does nothing where oneDNN has no bf16.
    """
    count = 0
    covered = {layer for part in module.modules() if is_replaced(part) for layer in vars(part)["forward"].covered}
    for layer in module.modules():
        if is_packable([layer]) and not is_replaced(layer) and layer not in covered:
            Packed(layer).put_on(layer)  # type: ignore[arg-type]
            count += 1
    return count
