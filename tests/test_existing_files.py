"""Commands replace a file only if they are told to, and find out before the work what cannot be written."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from pathlib import Path

import pytest

from fsd_bench.cli import main as bench
from fsd_core import files
from fsd_core.console import BAD_INPUT
from fsd_core.directories import replacing_directory
from fsd_core.errors import DataError
from fsd_core.files import writable, write_text
from fsd_core.locks import lock_for_run, reserved
from fsd_infer import FsdError
from fsd_infer.cli.main import main
from fsd_train.cli import main as train

WRITING = {
    "generate": (main, "--target no --prompt x --html"),
    "worth": (bench, "--target no --prompts p.txt --json"),
    "table": (bench, "--target no --sets p.txt --work w --markdown"),
    "run": (bench, "--target no --prompts p.txt --json"),
    "sweep": (bench, "--target no --prompts p.txt --rules tilted --output s.jsonl --html"),
    "board": (bench, "r.json --output"),
    "doctor": (train, "--target no --head h --data d --json"),
    "new-recipe": (train, "--target no --output"),
}


@pytest.mark.parametrize("command", WRITING)
def test_an_existing_file_is_replaced_only_if_the_command_says_so(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called, words = WRITING[command]
    kept = '{"methods": {}}'  # of an earlier run
    Path("mine").write_text(kept)
    assert called([command, *words.split(), "mine"]) == BAD_INPUT
    assert "mine is there already: add --overwrite to replace it, or give another name" in capsys.readouterr().err
    assert Path("mine").read_text() == kept
    assert called([command, *words.split(), "mine", "--overwrite"]) == BAD_INPUT, "other files are missing"
    assert "mine" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "sweep --rules tilted --prompts p.txt --output sweep.html",  # the report's name too
        "table --sets p.txt --work w --json w/p.json",  # a set's record
        "table --sets p.txt --work w --json x --markdown ./x",
    ],
)
def test_no_result_replaces_another_of_the_same_command(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench([*words.split(), "--target", "no"]) == BAD_INPUT
    assert "two results would go to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["pipe", "directory", "", "file/x", "a\0b", "x" * 300])
def test_what_cannot_be_written_is_found_before_the_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing but a file is ever replaced, which a rename onto a device would do."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(FsdError, match="cannot be written|not the name"):
        writable(f"{tmp_path}/{name}", "the record")
    if name in ("pipe", "directory"):
        with pytest.raises(FsdError, match="is not a file and is not replaced"):
            write_text(tmp_path / name, "")
    assert writable(tmp_path / "new" / "record.json", "the record").parent.is_dir()
    assert bench(["sweep", "--prompts", "p", "--rules", "tilted", "--output", "."]) == BAD_INPUT
    for words in ("regenerate --prompts p", "cache-features --data p"):
        assert train([*words.split(), "--target", "no", "--output", f"{tmp_path}/file/x.jsonl"]) == BAD_INPUT
        assert re.search(f"{tmp_path}/file/x.jsonl.* cannot be written", capsys.readouterr().err)
    with pytest.raises(OSError) as caught:  # it names the file, and not the draft beside it
        write_text(tmp_path / "none" / "record.json", "")
    assert caught.value.filename == str(tmp_path / "none" / "record.json")
    longest = writable(tmp_path / ("x" * 255), "the record")  # the draft beside it has room, too
    write_text(longest, "held")
    assert longest.read_text() == "held"


# locks ---------------------------------------------------------------------------------------------------------------


def test_a_directory_or_a_record_has_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exports mixed their files, and the later of two records replaced the other without --overwrite."""
    head, record = tmp_path / "head", tmp_path / "r.json"
    for text in ("one", "two"):
        with replacing_directory(head) as draft:
            (draft / "config.json").write_text(text)
            with pytest.raises(DataError, match=f"another run is writing {head}. Wait"), replacing_directory(head):
                raise AssertionError
    real, lock = fcntl.flock, record.with_name(f"{files.partial_prefix(record)}lock")

    def late(descriptor: int, operation: int) -> None:  # the run that holds the lock ends before it is asked for
        monkeypatch.setattr(fcntl, "flock", real)
        lock.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with reserved(record, "the record", False):
        with pytest.raises(FsdError, match=f"another run is writing {record}. Wait"):
            with reserved(record, "the record", False):
                raise AssertionError
    assert [path.name for path in tmp_path.iterdir()] == ["head"] and (head / "config.json").read_text() == "two"


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
