"""Directories that are written whole, before they take their name."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsd_core.errors import DataError
from fsd_core.files import disk_errors
from fsd_core.locks import lock_for_run

log = logging.getLogger(__name__)

_ADVICE = "Wait for it, or give another directory."


@contextmanager
def replacing_directory(directory: Path) -> Iterator[Path]:
    """Yield a new directory next to ``directory``, which replaces it if the block succeeds.

    So readers see the old files or the new ones, and an error leaves the old ones. What a killed process left is put
    right first, see :func:`recover_directory`. Raises OSError, which names ``directory``, and DataError if another
    process is writing it.
    """
    directory = directory.resolve()  # what a link points to, and not the link
    partial, old = _beside(directory)
    try:
        with disk_errors(directory):
            recover_directory(directory)
            _make(partial, directory)
            with _held(partial, directory):
                try:
                    yield partial
                    if directory.exists():
                        os.replace(directory, old)
                    os.replace(partial, directory)
                except BaseException:
                    if old.exists() and not directory.exists():
                        os.replace(old, directory)
                    shutil.rmtree(partial, ignore_errors=True)
                    raise
                # the lock went with the directory, so that the partial one may be another process's by now
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if str(partial) in str(error.filename):  # a name that nobody gave
            error.filename = str(error.filename).replace(str(partial), str(directory))
        raise


def recover_directory(directory: Path) -> None:
    """Put right what a kill left as ``directory`` was replaced, and say so.

    Raises DataError if another process is writing it.
    """
    partial, old = _beside(directory)
    if partial.is_dir():
        with _held(partial, directory):
            shutil.rmtree(partial, ignore_errors=True)
        log.info("%s is removed: a kill came as an export wrote", partial)
    if old.is_dir() and not directory.exists():
        os.replace(old, directory)
        log.info("%s is there again: a kill came as an export replaced it", directory)
    shutil.rmtree(old, ignore_errors=True)


def _make(partial: Path, directory: Path) -> None:
    try:
        partial.mkdir(parents=True)
    except FileExistsError as problem:
        raise DataError(f"another run is writing {directory}. {_ADVICE}") from problem


@contextmanager
def _held(partial: Path, directory: Path) -> Iterator[None]:
    """Keep other processes from writing ``directory`` while its partial directory is written or removed."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        lock_for_run(descriptor, directory, _ADVICE)
        yield
    finally:
        os.close(descriptor)


def _beside(directory: Path) -> tuple[Path, Path]:
    """Return where a new directory is written, and where the one that it replaces is until it has that name."""
    return directory.with_name(f".{directory.name}.partial"), directory.with_name(f".{directory.name}.old")
