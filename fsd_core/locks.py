"""Locks between processes: of files that are written, and of lock files beside them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path

from fsd_core.errors import DataError, FsdError
from fsd_core.files import partial_prefix, writable

log = logging.getLogger(__name__)

QUIET, PAUSE = 2.0, 0.125  # seconds that one process waits for another without a word, and between attempts


def lock_for_run(descriptor: int, path: Path, advice: str, error: type[FsdError] = DataError) -> bool:
    """Lock an open file or directory for this process, until the descriptor is closed.

    Returns:
        False, after a warning, where the file system has no locks: then two runs may write the same file.

    Raises:
        FsdError: ``error``, which names ``path`` and ends in ``advice``, if another run holds the lock.
    """
    try:
        import fcntl  # of POSIX systems

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as problem:
        raise error(f"another run is writing {path}. {advice}") from problem
    except (OSError, ModuleNotFoundError) as problem:
        _warn_unlocked(path, getattr(problem, "strerror", None) or str(problem))
        return False
    return True


@cache
def _warn_unlocked(path: Path, why: str) -> None:
    log.warning("%s cannot be locked (%s): see to it that no other run writes there", path, why)


def _unlock(descriptor: int) -> None:
    """Release the lock of :func:`lock_for_run`, which a child that was forked meanwhile would keep."""
    with suppress(OSError, ModuleNotFoundError):
        import fcntl  # of POSIX systems

        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file between processes, and say on stderr, as ``what``, that another process holds it."""

    def wait(descriptor: int) -> None:
        for attempt in count():
            with suppress(DataError):
                lock_for_run(descriptor, path, "")
                return
            if attempt == int(QUIET / PAUSE):
                print(f"[{what}] waiting for the process that holds {path}", file=sys.stderr, flush=True)
            time.sleep(PAUSE)

    with _holding(path, wait):
        yield


@contextmanager
def _holding(lock: Path, take: Callable[[int], object]) -> Iterator[None]:
    """Hold a lock file, which the block's end removes. ``take`` locks a descriptor."""
    while True:
        with lock.open("a") as file:
            take(file.fileno())
            if not _is_at(file.fileno(), lock):  # its last holder has just removed it
                time.sleep(PAUSE)
                continue
            try:
                yield
            finally:
                with suppress(OSError):
                    lock.unlink()
                _unlock(file.fileno())
            return


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still that at ``path``. Network file systems tell by other errors that it is not."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@contextmanager
def reserved(name: str | os.PathLike[str] | None, what: str, overwrite: bool) -> Iterator[Path | None]:
    """Check a path as :func:`writable` does, and keep other runs from reserving it within the block. None gives None.

    Raises FsdError, also if another run has reserved it.
    """
    if name is None:
        yield None
        return
    path = writable(name, what, overwrite)
    lock = path.with_name(f"{partial_prefix(path)}lock")
    advice = "Wait for it, or give another name."
    with _holding(lock, lambda descriptor: lock_for_run(descriptor, path, advice, FsdError)):
        yield writable(name, what, overwrite)  # another run may have written it before the lock was taken
