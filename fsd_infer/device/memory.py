"""Memory: free bytes for KV caches, the refusal of requests that need more, and the release of freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from fsd_core.errors import CacheMemoryError
from fsd_core.functional import is_host


def check_caches(needed: int, rows: int, tokens: int, device: torch.device, limit: int | None, held: int = 0) -> None:
    """Raise CacheMemoryError if the KV caches of a request do not fit.

    Args:
        needed: bytes of the caches.
        rows: number of texts, for the message.
        tokens: longest text, for the message.
        device: on which the caches lie. Unknown free memory does not limit them.
        limit: most bytes; None: no limit.
        held: bytes of earlier requests' caches that can be reused, besides the free ones.
    """
    free = free_bytes(device)
    free = None if free is None else free + held
    if limit is not None and needed > limit:
        reason = f"max_cache_bytes allows {_gib(limit)}"
    elif free is not None and needed > free:
        reason = f"{_gib(free)} are free on {device}"
    else:
        return
    raise CacheMemoryError(
        f"the key-value caches of this request ({rows} rows of {tokens} tokens) take {_gib(needed)}, but {reason}: use "
        "a smaller batch, shorter prompts or a smaller max_new_tokens."
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device; None if unknown."""
    if device.type == "cuda":  # including memory that torch has reserved and freed
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if not is_host(device):
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else 1024 * int(kibibytes)


def release_freed() -> None:
    """Return freed memory to the system, after collecting reference cycles."""
    gc.collect()
    trim()


def trim() -> None:
    """Let the C library return freed memory to the system, if it can (glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if malloc_trim is not None:
        malloc_trim(0)


def _gib(count: int) -> str:
    return f"{count} bytes ({count / 2**30:.3g} GiB)"
