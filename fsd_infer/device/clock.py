"""Seconds by phase of a decoding, taken where the work is done: on the host, or on a CUDA device."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """By the host's clock, which is right where a call returns when its work is done."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._phases: list[str] = []
        self._marks = [self._mark()]

    @property
    def seconds(self) -> float:
        """Since the start, by the host's clock."""
        return time.perf_counter() - self.start

    def lap(self, phase: str) -> None:
        """What was done since the last lap is ``phase``."""
        self._phases.append(phase)
        self._marks.append(self._mark())

    def phases(self) -> dict[str, float]:
        """Seconds by phase, so far."""
        spent: dict[str, float] = {}
        for phase, (first, last) in zip(self._phases, pairwise(self._marks), strict=True):
            spent[phase] = spent.get(phase, 0.0) + self._between(first, last)
        return spent

    def _mark(self) -> Any:
        return time.perf_counter()

    def _between(self, first: Any, last: Any) -> float:
        return last - first


class DeviceClock(Clock):
    """By events among what is launched. A launch returns at once: on the host's clock all of the device's time would be
    that of the phase which waits for it. Reading the phases waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        super().__init__()

    def phases(self) -> dict[str, float]:
        self._marks[-1].synchronize()
        return super().phases()

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1000  # from milliseconds


def clock_of(device: torch.device) -> Clock:
    """A clock for work on this device, started."""
    return DeviceClock(device) if device.type == "cuda" else Clock()
