"""Bound the time of work on a device by its bandwidth and peak (the roofline of Williams et al. 2009).

    seconds = max(bytes / bandwidth, operations / peak)

A real program is slower: launches, waits and kernels below the peak take an :class:`Overhead`, which was measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """A device as its data sheet describes it.

    Attributes:
        name: name of the device.
        memory: bytes.
        bandwidth: bytes per second from its memory.
        peak: bf16 operations per second, accumulated in fp32, without sparsity.
        source: source of the three numbers.
    """

    name: str
    memory: float
    bandwidth: float
    peak: float
    source: str


HARDWARE = (
    Hardware("A100", 80e9, 2.039e12, 312e12, "NVIDIA A100 80GB data sheet, SXM"),
    Hardware("H100", 80e9, 3.35e12, 989e12, "NVIDIA H100 data sheet, SXM; half the TFLOPS given with sparsity"),
    Hardware("H200", 141e9, 4.8e12, 989e12, "NVIDIA H200 data sheet, SXM; half the TFLOPS given with sparsity"),
    Hardware("L4", 24e9, 0.3e12, 121e12, "NVIDIA L4 data sheet; half the TFLOPS given with sparsity"),
    Hardware("RTX 4090", 24e9, 1.008e12, 165.2e12, "NVIDIA Ada GPU architecture white paper, appendix A"),
)


def peak_of(device: str) -> float | None:
    """Return the bf16 peak of a device by the name that its driver gives, or None if it is not in the table."""
    # boards of the same chip with other clocks have a word more
    named = (
        hardware
        for hardware in HARDWARE
        if re.search(rf"\b{hardware.name}\b(?! (?:PCIe|NVL|Laptop|.*\bMIG\b|D\b))", device)
    )
    return next((hardware.peak for hardware in named), None)


@dataclass(frozen=True)
class Overhead:
    """What decoding takes beyond the bound, fitted to measured rounds.

    Attributes:
        share: fraction of the data sheet's bandwidth, reached by a copy.
        layer: seconds of a forward per decoder layer: small kernels, and gaps between launches.
        step: seconds of a draft step.
        judging: seconds of a round's rule and commit, where there is a tree.
        source: what was measured.
    """

    share: float
    layer: float
    step: float
    judging: float
    source: str


# Llama-3.1-8B's shape, batch 1, an EAGLE-3 head: a plain round of 9.06 ms, a draft step of 2.2, rounds of 23.1 and
# 27.6.
FORWARD_GRAPHS = Overhead(0.89, 0.17e-3, 2.0e-3, 0.8e-3, "an H200, one CUDA graph per forward, at d68b4f5")
SPARE = 0.1  # of a device's memory that is kept free: the CUDA context, fragments


@dataclass(frozen=True)
class Work:
    """Work that is done ``times`` times in sequence.

    Attributes:
        name: what it is.
        bytes, operations: of one repetition.
        how: the formula, with its numbers.
        times: number of times.
        shared: whether several devices divide it evenly; otherwise each of them does all of it.
    """

    name: str
    bytes: float
    operations: float
    how: str
    times: int = 1
    shared: bool = False

    def seconds(self, hardware: Hardware, devices: int = 1) -> float:
        """Return the least seconds. What several devices exchange is not counted."""
        alone = self.times * max(self.bytes / hardware.bandwidth, self.operations / hardware.peak)
        return alone / devices if self.shared else alone


@dataclass(frozen=True)
class MemoryItem:
    """Something that takes memory: its name, bytes and formula; ``shared`` as in :class:`Work`."""

    name: str
    bytes: float
    how: str
    shared: bool = False


def devices_for(parts: Iterable[MemoryItem], hardware: Hardware) -> int | None:
    """Return the fewest of 1, 2, 4 and 8 devices that hold these parts with :data:`SPARE` to spare, or None."""
    parts, free = list(parts), (1 - SPARE) * hardware.memory
    sums = ((count, sum(part.bytes / (count if part.shared else 1) for part in parts)) for count in (1, 2, 4, 8))
    return next((count for count, total in sums if total <= free), None)


def seconds(work: Iterable[Work], hardware: Hardware, devices: int = 1) -> float:
    """Return the seconds of parts that run in sequence."""
    return sum(part.seconds(hardware, devices) for part in work)


def device_rows(
    parts: Sequence[MemoryItem], cells: Callable[[Hardware, int], list[str]], columns: Sequence[str]
) -> list[list[str]]:
    """Return a row per device: its name, how many hold the parts, and ``cells``; "-" if eight are too few."""
    counts = {hardware: devices_for(parts, hardware) for hardware in HARDWARE}
    return [
        [hardware.name, "over 8", *("-" for _ in columns[2:])]
        if count is None
        else [hardware.name, str(count), *cells(hardware, count)]
        for hardware, count in counts.items()
    ]


def size(number: float) -> str:
    """Format bytes in GB or MB, which are powers of ten."""
    if number < 5e7:
        return f"{number / 1e6:.2g} MB"
    return f"{number / 1e9:.{1 if number >= 1e9 else 2}f} GB"
