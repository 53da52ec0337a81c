"""Tensors between host and device, and batch rows of different lengths: padding, picking nodes, masks, draws.

Decoding's state stays on the target's device. A launch returns at once, but a transfer to the host waits for all
earlier launches. So a round has one such transfer, for its report (fsd_infer/engine/report.py). Transfers to the device
do not block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_STAGED = 2**16  # bytes that CUDA copies from pageable memory without a sync


class _Memory(NamedTuple):
    """How the host reaches a kind of device.

    Attributes:
        is_host: whether it reads tensors there without waiting.
        is_shared: whether the two share memory, so that copies need no pinned pages.
        wide: the widest floating-point type.
    """

    is_host: bool = False
    is_shared: bool = False
    wide: torch.dtype = torch.float64


_MEMORIES = {"cpu": _Memory(is_host=True, is_shared=True), "mps": _Memory(is_shared=True, wide=torch.float32)}
_APART = _Memory()  # of all other kinds


def _memory(device: torch.device) -> _Memory:
    """The one place where decoding asks for the kind of a device."""
    return _MEMORIES.get(device.type, _APART)


def is_host(device: torch.device) -> bool:
    """Whether the host reads tensors of this device without waiting, so that shapes may follow from values."""
    return _memory(device).is_host


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device, which holds any token id exactly."""
    return _memory(device).wide


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device`` without a sync."""
    if not _memory(device).is_shared and values.nbytes > _STAGED:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def put(values: Tensor, into: Tensor) -> None:
    """Write values of the CPU or of the same device to a tensor there, without a sync."""
    pins = is_host(values.device) and not _memory(into.device).is_shared and values.nbytes > _STAGED
    into.copy_(values.pin_memory() if pins else values, non_blocking=True)


def on_host(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors [B, N] of one device, each with its own N, to the CPU in one transfer. Syncs.

    Tensors of other devices arrive in the device's widest floating-point type.
    """
    if is_host(tensors[0].device):
        return list(tensors)
    return list(packed(*tensors).cpu().split([tensor.shape[1] for tensor in tensors], dim=1))


class Transfer:
    """A tensor on its way to the host, behind what is launched so far and beside what is launched later."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: torch.Event | None = None
        if not _memory(values.device).is_shared:
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


def trimmed_on_host(counts: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Cut off what is padding in all rows, where the host reads counts without waiting; elsewhere change nothing.

    Args:
        counts: [B] real entries of each row.
        tensors: [B, K, ...], padded at their ends.

    Returns:
        [B, K', ...] each.
    """
    if not is_host(counts.device):
        return list(tensors)
    longest = int(counts.max())
    return [tensor[:, :longest] for tensor in tensors]


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Pick values [B, N, ...] at nodes [B, K] -> [B, K, ...]. Copies whole entries, unlike gather."""
    if len(values) == 1:
        return values[0].index_select(0, nodes[0])[None]
    count = values.shape[1]
    index = nodes + count * torch.arange(nodes.shape[0], device=nodes.device)[:, None]
    return values.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, nodes.shape)


def kept_rows(values: Any, rows: Tensor) -> Any:
    """Return rows [B'] (on the CPU) of a tensor [B, ...] or of a list of B entries; None unchanged."""
    if isinstance(values, Tensor):
        return values[to_device(rows, values.device)]
    return None if values is None else [values[row] for row in rows.tolist()]


def visible_slots(lengths: Tensor, visible_after: Tensor, used: int | None = None) -> Tensor:
    """Return which cache slots new tokens may attend to: the whole text, and chosen slots after it.

    Args:
        lengths: [B] text length of each row; the text occupies slots 0 to length - 1.
        visible_after: [B, M, E] bool; whether token i may attend to the e-th slot after the text.
        used: S, at least the longest text + E; None: that, for lengths on the CPU.

    Returns:
        [B, M, S] bool on the device of ``visible_after``.
    """
    (_, new, extra), device = visible_after.shape, visible_after.device
    if is_host(lengths.device):
        used = int(lengths.max()) + extra if used is None else used
        if lengths.shape[0] == 1:  # no offsets between rows
            visible = torch.nn.functional.pad(visible_after, (int(lengths), 0), value=True)
            more = used - visible.shape[-1]
            return torch.nn.functional.pad(visible, (0, more)) if more else visible
    assert used is not None, "lengths on a device tell the host nothing"
    offset = torch.arange(used, device=device) - to_device(lengths, device)[:, None]  # [B, S]
    index = offset.clamp(0, max(extra - 1, 0))[:, None].expand(-1, new, -1)
    inside = ((offset >= 0) & (offset < extra))[:, None]
    return torch.where(inside, visible_after.gather(2, index) if extra else inside, (offset < 0)[:, None])


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask (True: visible) to the term that eager attention adds: 0, or the least ``dtype`` value."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
