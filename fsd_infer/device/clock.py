"""Seconds by phase of a decoding run, measured by the host or by a CUDA device."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """The host's clock, for devices on which a call returns when its work is done."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self._phases: list[str] = []
        self._marks = [self._mark()]

    @property
    def seconds(self) -> float:
        """Seconds since the start, by the host's clock."""
        return time.perf_counter() - self.start

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to ``phase``."""
        self._phases.append(phase)
        self._marks.append(self._mark())

    def phases(self) -> dict[str, float]:
        """Return seconds by phase, so far."""
        spent: dict[str, float] = {}
        for phase, (first, last) in zip(self._phases, pairwise(self._marks), strict=True):
            spent[phase] = spent.get(phase, 0.0) + self._between(first, last)
        return spent

    def _mark(self) -> Any:
        return time.perf_counter()

    def _between(self, first: Any, last: Any) -> float:
        return last - first


class DeviceClock(Clock):
    """CUDA events between launches. The host's clock would attribute all device time to the phase that syncs.

    Reading the phases syncs with the device.
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
    """Return a started clock for work on this device."""
    return DeviceClock(device) if device.type == "cuda" else Clock()
