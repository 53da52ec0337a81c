"""Transfers between host and device. Models' outputs stay on the device; the engine's own state is on the CPU.

A launch returns at once, but a transfer to the host waits for all earlier launches. So a round has one such transfer,
for the verdict (fsd_infer/rules/_walk.py). Transfers to the device do not block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_STAGED = 2**16  # bytes that CUDA copies from pageable memory without a sync
_UNPINNED = {"cpu", "mps"}  # devices that share the host's memory


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device, which holds any token id exactly."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no fp64


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device`` without a sync."""
    if device.type not in _UNPINNED and values.nbytes > _STAGED:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors [B, N] of one device, each with its own N, to the CPU in one transfer. Syncs.

    Tensors of other devices arrive in the device's widest floating-point type.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    whole = torch.cat([tensor.to(wide(tensor.device)) for tensor in tensors], dim=1).cpu()
    return list(whole.split([tensor.shape[1] for tensor in tensors], dim=1))


def lists(*tensors: Tensor) -> list[Any]:
    """Return tensors [B, N] of one device, each with its own N, as nested lists, in one transfer.

    Integers and booleans become ``int``.
    """
    if tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    return [
        part.tolist() if tensor.is_floating_point() else [[int(number) for number in row] for row in part.tolist()]
        for tensor, part in zip(tensors, on_host(*tensors), strict=True)
    ]
