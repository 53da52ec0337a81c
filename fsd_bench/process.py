"""Measure a method in its own process, without anything else in its memory.

The process reads a JSON line per question from standard input and answers each with a line on standard output::

    (when it is ready)                                          -> {}
    {"prompts": [[1, 2]], "options": {"max_new_tokens": 64, "do_sample": false}, "seed": 0}
                                                                -> the fields of :class:`TimedRun`
    {"describe": true}                                          -> the fields of :meth:`Method.describe`

or with ``{"error": "one line"}``. It ends when its input does. It measures its own time, so neither its start nor the
pipe counts. Any program with this protocol can be measured: ``NAME=command:PROGRAM ARGUMENTS``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fsd_bench.base import Method, TimedRun, typed
from fsd_core.errors import FsdError
from fsd_core.files import parse_json

STOP_SECONDS = 20.0
PATIENCE = 60.0  # until we say what we wait for: a model may load for long


class ProcessMethod(Method):
    """A method in a process. The constructor waits until the process is ready.

    Args:
        name: name of the method.
        command: program and arguments.
        environment: variables that replace this process's or are added to them.

    Attributes:
        load_seconds: seconds from the start until it was ready.

    Raises:
        FsdError: the process cannot be started, or it ended.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        start = time.perf_counter()
        try:
            self._process: subprocess.Popen[str] | None = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        except OSError as error:
            self._process = None
            raise FsdError(f"method {name!r}: {command[0]} cannot be started ({error}).") from error
        notice = f"notice: method {name!r} waits for its process, which says {{}} on a line when it is ready."
        timer = threading.Timer(PATIENCE, print, (notice,), {"file": sys.stderr})
        timer.daemon = True
        timer.start()
        try:
            self._read()
        except BaseException:  # an interrupt must not leave it running either
            self.close()
            raise
        finally:
            timer.cancel()
        self.load_seconds = time.perf_counter() - start

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        reply = self._ask({"prompts": prompts, "options": options, "seed": seed})
        try:
            run: TimedRun = typed(reply, TimedRun)
            # two clocks may differ a little
            if not 0 <= run.prefill_seconds <= 1.01 * run.seconds < math.inf or run.seconds == 0:
                raise ValueError(f"{run.seconds} seconds in all, {run.prefill_seconds} until the first token")
            if len(run.answers) != len(prompts):
                raise ValueError(f"{len(run.answers)} answers to {len(prompts)} prompts")
        except (TypeError, KeyError, ValueError) as error:
            raise FsdError(f"method {self.name!r}: its process did not answer with a timed run ({error}).") from error
        return run

    def describe(self) -> dict[str, Any]:
        return {**self._ask({"describe": True}), "load_seconds": self.load_seconds}

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.close()
            process.wait(STOP_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
        finally:
            process.wait()
            process.stdout.close()
            self._log.close()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended; its last words are read below
            pass
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            lines = [text.strip() for text in self._log if text.strip()] or ["it wrote nothing to standard error."]
            raise FsdError(f"method {self.name!r}: its process ended with status {status}: {lines[-1]}")
        answer = parse_json(
            line.encode(), f"method {self.name!r}", "Its process must answer in lines of JSON.", FsdError
        )
        if not isinstance(answer, dict):
            raise FsdError(f"method {self.name!r}: its process must answer with JSON objects.")
        if "error" in answer:
            raise FsdError(f"method {self.name!r}: {answer['error']}")
        return answer
