"""What the processor is and can do, from the system's own description."""

from __future__ import annotations

from pathlib import Path


def processor(field: str) -> str:
    """A field of the processor's description, as the system reports it; "" outside of Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def cpu_flags() -> set[str]:
    """Instruction sets of the processor, by Linux's names."""
    return set(processor("flags").split())
