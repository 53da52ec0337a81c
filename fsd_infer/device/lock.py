"""A lock for resources that one request uses at a time."""

from __future__ import annotations

import threading
from typing import Any


class RequestLock:
    """A reentrant lock. A copy of an object with this lock, also by pickling, gets a new lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return RequestLock, ()
