"""Keep finished runs as JSON lines, so that a killed measurement can continue. The first line has the settings."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_bench.base import TimedRun, typed
from fsd_core.console import terminable
from fsd_core.errors import FsdError
from fsd_core.files import append_json, jsonable, write_text
from fsd_core.locks import lock_for_run

VERSION = 3  # of the format
_DIGESTS, _DIGEST = "digests", "sha256"  # of the settings: that lines have one; of a line


@dataclass(frozen=True)
class Trial:
    """One method answers one group of prompts, once."""

    method: str
    group: int
    repeat: int = 0
    temperature: float = 0.0


class RunFile:
    """The runs of a measurement, on disk as soon as they are finished.

    A line that a kill cut short, or that was edited, is dropped with all lines after it, which is said. A file with
    other settings is neither extended nor overwritten.

    Args:
        path: file in an existing folder; None keeps runs in memory.
        kind: "bench" or "sweep".
        settings: JSON values that must be equal for a measurement to continue.
        trials: all trials, and how many answers each gives.
        facts: further facts of the first line.
        advice: how to continue after an error, and the alternative to equal settings.

    Attributes:
        runs: runs by trial.
        described: descriptions of the methods by name.

    Raises:
        FsdError: a file of another kind or with other settings is in the way, or another process measures into it.
    """

    def __init__(
        self,
        path: Path | None,
        kind: str,
        settings: dict[str, Any],
        trials: Mapping[Trial, int],
        facts: dict[str, Any] | None = None,
        advice: tuple[str, str] = ("the same command continues it", "another name"),
    ) -> None:
        self.path, self.advice = path, advice[0]
        self.runs: dict[Trial, TimedRun] = {}
        self.described: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        head = {kind: VERSION, "settings": settings, _DIGESTS: True, **(facts or {})}
        with alone(path):
            self._open(path, kind, head, trials, advice[1])

    def _open(self, path: Path, kind: str, head: dict[str, Any], trials: Mapping[Trial, int], otherwise: str) -> None:
        """Read a file that can be continued, and write it with the head and what was read."""
        settings = head["settings"]
        line_count = path.read_bytes().count(b"\n") if path.is_file() else 0
        stored, *lines = read_lines(path, kind) or [head]
        differing = sorted(
            key for key in {*stored["settings"], *settings} if stored["settings"].get(key) != settings.get(key)
        )
        if differing:
            raise FsdError(
                f"{path} was made with other settings ({', '.join(differing)}): use the same, or {otherwise}."
            )
        environment = stored.get("environment")
        if isinstance(environment, dict) and environment.keys() == head.get("environment", {}).keys():
            head["environment"] = environment  # of the first process
        valid = [head]
        for line in lines:
            if not self._read(line, trials):
                break
            valid.append(line)
        if line_count > len(valid):
            reason = f"line {len(valid) + 1} is damaged or was edited"
            print(f"{path}: {reason}, so what follows is measured again.", file=sys.stderr)
        write_text(path, "".join(json.dumps(line) + "\n" for line in [head, *map(_signed, valid[1:])]))

    def _read(self, line: dict[str, Any], trials: Mapping[Trial, int]) -> bool:
        """Take in a line. Return False if it does not belong to this measurement."""
        try:
            if "described" in line:
                self.described.update(typed(line["described"], dict[str, dict[str, Any]]))
                return True
            trial, run = read_run(line)
        except (TypeError, KeyError, ValueError):
            return False
        if trials.get(trial) != len(run.answers):
            return False
        self.runs[trial] = run
        return True

    def add(self, trial: Trial, run: TimedRun) -> None:
        """Keep a finished run. It is on disk when this returns."""
        self.runs[trial] = run
        self._append({"trial": asdict(trial), "run": asdict(run)})

    def describe(self, name: str, facts: dict[str, Any]) -> None:
        """Keep the description of a method."""
        self.described[name] = facts
        self._append({"described": {name: facts}})

    def _append(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            append_json(self.path, _signed(jsonable(line)))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep other processes out, and say what is kept and how to continue if an error, Ctrl-C or SIGTERM ends it.

        A file without a run is removed. Raises FsdError if another process measures into the file.
        """
        with alone(self.path), terminable(), self._report_kept_runs():
            yield

    @contextmanager
    def _report_kept_runs(self) -> Iterator[None]:
        try:
            yield
        except (FsdError, KeyboardInterrupt) as error:
            if self.path is None:
                raise
            if not self.runs:
                self.path.unlink(missing_ok=True)
                raise
            kept = f"{len(self.runs)} finished runs are kept in {self.path}: {self.advice}."
            if isinstance(error, KeyboardInterrupt):
                print(kept, file=sys.stderr)
            else:
                error.args = (f"{str(error).removesuffix('.')}. {kept}",)
            raise


@contextmanager
def alone(path: Path | None) -> Iterator[None]:
    """Hold a file, if it exists. Raises FsdError if another process does."""
    if path is None or not path.is_file():
        yield
        return
    with path.open("rb") as file:
        lock_for_run(file.fileno(), path, "Wait for it, or give another name.", FsdError)
        yield


def _signed(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with a digest of its values, by which an edited one is known."""
    return {**line, _DIGEST: hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]}


def read_run(line: dict[str, Any]) -> tuple[Trial, TimedRun]:
    """Return the trial and run of a line. Raises TypeError, KeyError or ValueError if it has none."""
    trial = line["trial"] if "trial" in line else line["job"]  # its name in files of earlier versions
    return typed(trial, Trial), typed(line["run"], TimedRun)


def read_lines(path: Path, kind: str) -> list[dict[str, Any]] | None:
    """Return the objects of a file up to its first damaged or edited line, the settings first; None if it is empty.

    None too without a file. Files of earlier versions have no digests, and are believed.

    Raises:
        FsdError: a file of another kind.
    """
    if not path.exists():
        return None
    if not path.is_file():
        raise FsdError(f"{path} is not a file: give another name.")
    content = path.read_bytes()
    lines: list[dict[str, Any]] = []
    for line in content.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict):
            break
        unsigned = {key: entry for key, entry in value.items() if key != _DIGEST}
        if lines and lines[0].get(_DIGESTS) and value != _signed(unsigned):
            break
        lines.append(unsigned if lines else value)
    if content and not (lines and lines[0].get(kind) == VERSION and isinstance(lines[0].get("settings"), dict)):
        raise FsdError(
            f"{path} is not a file of a {kind}, or has another version, and is not overwritten: delete it, or give "
            "another name."
        )
    return lines or None
