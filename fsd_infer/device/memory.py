"""Memory: what is free for key-value caches, the refusal of requests that need more, and giving back what was freed."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from fsd_infer.errors import CacheMemoryError


def check_caches(needed: int, rows: int, tokens: int, device: torch.device, limit: int | None, held: int = 0) -> None:
    """Raise CacheMemoryError if caches of ``needed`` bytes, for ``rows`` texts of up to ``tokens`` tokens, exceed
    ``limit`` bytes (None: no limit) or what is free on the device, as far as that is known, and the ``held`` bytes that
    earlier requests' caches left for it.
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
    """What can be allocated on a device, or None where it is not reported."""
    if device.type == "cuda":  # torch keeps what was freed for later
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else 1024 * int(kibibytes)


def release_freed() -> None:
    """Return to the system what has been freed, what only cycles still refer to included."""
    gc.collect()
    trim()


def trim() -> None:
    """Let the C library return what has been freed, where it can (glibc)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if malloc_trim is not None:
        malloc_trim(0)


def _gib(count: int) -> str:
    return f"{count} bytes ({count / 2**30:.3g} GiB)"
