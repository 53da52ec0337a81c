"""Two runs that would write one place: the second is refused; without locks a warning says so, and it goes on."""

import errno
import logging
from pathlib import Path

import pytest

from fsd_core.files import lock_for_run


def test_a_file_system_without_locks_is_named_once_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with caplog.at_level(logging.WARNING):
        assert not lock_for_run(0, tmp_path, "Wait.")
    (line,) = caplog.messages
    assert str(tmp_path) in line and "No locks available" in line and "\n" not in line
