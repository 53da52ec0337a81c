"""Tensors between host and device, and batch rows of different lengths.

Decoding's state stays on the target's device. A launch returns at once, but a transfer to the host waits for all
earlier launches. So a round has one such transfer, for its report (fsd_infer/engine/report.py). Transfers to the device
do not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_core.functional import is_host, memory_of, wide

_STAGED = 2**16  # bytes that CUDA copies from pageable memory without a sync


def as_python(value: Any) -> Any:
    """Return the numbers of a tensor or of an array as Python's, in lists, and other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device`` without a sync."""
    if not memory_of(device).is_shared and values.nbytes > _STAGED:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def put(values: Tensor, into: Tensor) -> None:
    """Write values of the CPU or of the same device to a tensor there, without a sync."""
    pins = is_host(values.device) and not memory_of(into.device).is_shared and values.nbytes > _STAGED
    into.copy_(values.pin_memory() if pins else values, non_blocking=True)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors [B, N] of one device, each with its own N, to the CPU in one transfer. Syncs.

    Tensors of other devices arrive in the device's widest floating-point type.
    """
    if is_host(tensors[0].device):
        return list(tensors)
    return list(packed(*tensors).cpu().split([tensor.shape[1] for tensor in tensors], dim=1))


class Transfer:
    """A tensor on its way to the host, copied after what is launched so far, in parallel to later launches."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: torch.Event | None = None
        if not memory_of(values.device).is_shared:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.Event(values.device)
            self._arrived.record(torch.accelerator.current_stream(values.device))

    def wait(self) -> Tensor:
        """Return the tensor on the CPU. Syncs with the device as far as it was when the transfer began."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.cpu()


def packed(*tensors: Tensor) -> Tensor:
    """Return tensors [B, N] of one device, each with its own N, as one [B, sum], in the device's widest type."""
    return torch.cat([tensor.to(wide(tensor.device)) for tensor in tensors], dim=1)


def lists(*tensors: Tensor) -> list[Any]:
    """Return tensors [B, N] of one device, each with its own N, as nested lists, in one transfer.

    Integers and booleans become ``int``.
    """
    if is_host(tensors[0].device):
        return [tensor.tolist() for tensor in tensors]
    return [
        part.tolist() if tensor.is_floating_point() else [[int(number) for number in row] for row in part.tolist()]
        for tensor, part in zip(tensors, on_host(*tensors), strict=True)
    ]


def padded(rows: Sequence[Sequence[Any]], fill: float = 0) -> Tensor:
    """Pad rows at their ends to [B, N], on the CPU."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (most - len(row))] for row in rows])


def kept_rows(values: Any, rows: Tensor) -> Any:
    """Return rows [B'] (on the CPU) of a tensor [B, ...] or of a list of B entries; None unchanged."""
    if isinstance(values, Tensor):
        return values[to_device(rows, values.device)]
    return None if values is None else [values[row] for row in rows.tolist()]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (True: visible) to the term that eager attention adds: 0, or the least ``dtype`` value."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
