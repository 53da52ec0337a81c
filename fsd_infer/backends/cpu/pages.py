"""Memory for packed weights, in huge pages where the system has them.

A forward streams through all weights once. In pages of 4 KB, looking up where each page lies takes up to a third of its
time. Weights are smaller than a huge page (2 MB), so many share one mapping.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

_CHUNK = 32 << 20  # bytes of a mapping; memory is taken as it is written to
_HUGE = 2 << 20
_LINE = 64  # bytes of a cache line, at which weights begin
_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)  # what is left of the last mapping


def zeroed(size: int) -> Tensor:
    """Return ``size`` bytes of zeros [size], uint8. A mapping is given back once no tensor lies in it."""
    global _free
    rounded = -(-size // _LINE) * _LINE
    with _lock:
        if rounded > len(_free):
            _free = _mapped(max(rounded, _CHUNK))
        memory, _free = _free[:size], _free[rounded:]
    return memory


def _mapped(size: int) -> Tensor:
    """Return a new mapping of at least ``size`` bytes that begins with a huge page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    start = -buffer.data_ptr() % _HUGE
    return buffer[start : start + size]
