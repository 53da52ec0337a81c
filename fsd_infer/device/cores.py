"""How many threads a request on a CPU uses: as many as there are cores that other processes leave to it.

OpenMP's threads spin for each other at every barrier. Where another process takes one's core, all of them wait for it,
and the speed falls to a fourth or less. With a thread less, each has a core of its own. So a request looks a few times
a second at how busy other processes keep its cores, which costs some 0.05 ms. FSD_THREADS=fixed leaves the threads as
asked.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fsd_core.errors import FsdError
from fsd_core.functional import is_host

logger = logging.getLogger(__name__)

SECONDS = 0.15  # between two readings
STALE = 2.0  # seconds after which a reading is too old to compare with
UNNOTICED = 0.35  # cores that others may take unnoticed; a process that shares a core with a spinning thread gets half
_COUNTS = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100  # units of /proc/stat in a second
_WORKING = (1, 2, 3, 6, 7)  # its columns: user, nice, system and both interrupts; neither idle nor stolen by a host


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds until a moment.

    Attributes:
        at: the moment, in seconds.
        used: by all processes, on the cores that this process may use.
        own: by this process.
    """

    at: float
    used: float
    own: float


def cpu_times() -> CpuTimes | None:
    """Read the system's counts; None where there are none, as outside of Linux."""
    try:
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in _COUNTS.read_text().splitlines() if line.startswith("cpu")]
        ticks = sum(int(line[column]) for line in lines if line[0] in cores for column in _WORKING)
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return CpuTimes(time.monotonic(), ticks / _TICKS, time.process_time())


def cores_taken(before: CpuTimes, after: CpuTimes) -> float:
    """Return how many cores other processes kept busy between two readings."""
    return max(0.0, (after.used - before.used - after.own + before.own) / (after.at - before.at))


def free_threads(requested: int, cores: int, taken: float) -> int:
    """Return how many of the requested threads find a core if other processes keep ``taken`` of ``cores`` busy."""
    busy = math.ceil(taken - UNNOTICED)
    return requested if busy <= 0 else max(1, min(requested, cores - busy))


class Cores:
    """The cores of this process, as all of its requests see them.

    Args:
        read_times: reads the counts.
        count: how many cores there are.
    """

    def __init__(
        self, read_times: Callable[[], CpuTimes | None] = cpu_times, count: Callable[[], int] | None = None
    ) -> None:
        self._read_times, self._count = read_times, count or _own_cores
        self._lock = threading.Lock()
        self._last, self._taken, self._requests, self._said = read_times(), 0.0, 0, False

    def threads(self, requested: int) -> int:
        """Return how many threads a request gets of those it asks for. Concurrent requests share the cores."""
        if requested < 2 or _mode() == "fixed":
            return requested
        with self._lock:
            if self._last is not None and time.monotonic() - self._last.at >= SECONDS:
                now = self._read_times()
                if now is not None:  # times of long ago say nothing of now
                    self._taken = cores_taken(self._last, now) if now.at - self._last.at <= STALE else 0.0
                self._last = now
            free = free_threads(requested, self._count(), self._taken)
            if free < requested and not self._said:
                self._said = True
                logger.info("other processes keep cores busy: %d of %d threads while they do.", free, requested)
            return max(1, free // max(1, self._requests))

    def enter(self) -> None:
        """Count a request that begins. Raises FsdError for an unknown FSD_THREADS."""
        _mode()
        with self._lock:
            self._requests += 1

    def leave(self) -> None:
        """Count a request that ends."""
        with self._lock:
            self._requests -= 1


@cache
def of_process() -> Cores:
    """Return the cores of this process."""
    return Cores()


class Team:
    """The threads of a request in progress. Only the calling thread is affected, and only within the context.

    Our kernels give the same bits with any number of threads, torch's products do not.

    Args:
        device: device of the target; on others than CPUs nothing changes.
        repeatable: whether torch must keep its number of threads, so that a request with a seed repeats its answer.
    """

    def __init__(self, device: torch.device, repeatable: bool) -> None:
        self._cores = of_process() if is_host(device) else None
        self._set = None if repeatable else _setter()
        self._asked = self._now = torch.get_num_threads()

    def __enter__(self) -> Team:
        self._outer: int | None = getattr(_here, "limit", None)
        if self._cores is not None and self._outer is None:
            self._cores.enter()
            self.fit_to_free_cores()
        return self

    def __exit__(self, *error: object) -> None:
        if self._cores is not None and self._outer is None:
            self._cores.leave()
            self._use(self._asked)
            _here.limit = None

    def fit_to_free_cores(self) -> None:
        """Use no more threads than there are free cores. Called before each round."""
        if self._cores is None or self._outer is not None:
            return
        current = torch.get_num_threads()
        if current != self._now:  # a callback has set it
            self._asked = self._now = current
            if self._set is not None:
                self._set(current, True)
        _here.limit = self._cores.threads(self._asked)
        self._use(_here.limit)

    def _use(self, threads: int) -> None:
        if self._set is not None and threads != self._now:
            self._set(threads, threads == self._asked)
            self._now = torch.get_num_threads()


_here = threading.local()


def team_size() -> int:
    """Return how many threads a kernel called by this thread may use."""
    limit: int | None = getattr(_here, "limit", None)
    return torch.get_num_threads() if limit is None else min(limit, torch.get_num_threads())


@cache
def _setter() -> Callable[[int, bool], None] | None:
    """Return what sets OpenMP's and MKL's threads for the calling thread, and whether they are torch's own number.

    ``torch.set_num_threads`` would also set the number that threads get which start meanwhile. None where torch has no
    OpenMP.
    """
    try:
        library: Any = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        openmp = library.omp_set_num_threads
    except (StopIteration, OSError, AttributeError):
        return None
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)

    def set_threads(threads: int, torchs_own: bool) -> None:
        openmp(threads)
        if mkl is not None:
            mkl(0 if torchs_own else threads)  # 0: as torch has set for all threads

    return set_threads


def _own_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _mode() -> str:
    """Return FSD_THREADS: "shared" (default) or "fixed". Raises FsdError for another value."""
    mode = os.environ.get("FSD_THREADS", "shared")
    if mode not in ("shared", "fixed"):
        raise FsdError(f"FSD_THREADS={mode!r}: it is shared (a thread less where a core is taken) or fixed.")
    return mode


_had_threads = False  # when this process was forked


def _before_fork() -> None:
    global _had_threads
    _had_threads = threading.active_count() > 1
    with suppress(OSError):
        _had_threads = len(os.listdir("/proc/self/task")) > 1


def _in_child() -> None:
    """Use one thread in a forked process: OpenMP would wait for its parent's threads, which it does not have."""
    of_process.cache_clear()  # another thread may have held its lock
    _here.limit = None
    if _had_threads:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
