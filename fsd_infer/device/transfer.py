"""Between the host and a model's device. What a model makes stays on its device; what the engine knows is on the CPU.

A launch returns at once, a transfer to the host waits for all that was launched before it. So a round has one, at its
end (fsd_infer/rules/_walk.py), and what goes the other way is not waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_STAGED = 2**16  # bytes up to which CUDA copies ordinary memory without waiting
_UNPINNED = {"cpu", "mps"}  # devices that share the host's memory


def wide(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device. Token ids fit into either."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no fp64


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on ``device``, without waiting for what runs there."""
    if device.type not in _UNPINNED and values.nbytes > _STAGED:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Tensors [B, N] of one device, each with its own N, on the CPU, in one transfer. Waits for the device.

    From another device they come in its widest floating-point type.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    whole = torch.cat([tensor.to(wide(tensor.device)) for tensor in tensors], dim=1).cpu()
    return list(whole.split([tensor.shape[1] for tensor in tensors], dim=1))


def lists(*tensors: Tensor) -> list[Any]:
    """Tensors [B, N] of one device, each with its own N, as nested lists, in one transfer; whole numbers and truth
    values as ``int``.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    return [
        part.tolist() if tensor.is_floating_point() else [[int(number) for number in row] for row in part.tolist()]
        for tensor, part in zip(tensors, on_host(*tensors), strict=True)
    ]
