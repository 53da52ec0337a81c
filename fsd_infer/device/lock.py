"""A lock for resources that one request uses at a time."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet


class RequestLock:
    """A reentrant lock. A copy of an object with this lock, also by pickling, gets a new lock.

    A forked process has the thread that forked alone, so what other threads held is free there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestLock, ()


_LOCKS = WeakSet[RequestLock]()


def _free_locks() -> None:
    for lock in _LOCKS:
        if lock._lock.acquire(blocking=False):  # free, or held by this thread
            lock._lock.release()
        else:
            lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free_locks)
