"""Grammars: a process of their own tries them first, and a thread with a deep stack compiles them.

llguidance reads grammars by recursion, and one whose rules follow each other thousands deep ends the process. So
:mod:`.grammar_child` tries every grammar with a smaller stack than the one that compiles it here.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from fsd_core.errors import FsdError, imported
from fsd_infer.request.grammar_child import STACK, TOO_DEEP

MAX_TEXT = 1 << 20  # characters of a grammar
SECONDS = 5.0  # most time to try a grammar
LEVELS = 1000  # rules or references that may always follow each other
# llguidance's own bounds refuse 600 optional properties, or 2,000 alternatives; a mask stays within some 10 ms
LIMITS = {"max_items_in_row": 20_000, "step_max_items": 200_000, "verbose_errors": False}
_START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
)
_Result = TypeVar("_Result")


@lru_cache(maxsize=16)
def serialised(maker: str, text: str, what: str, options: str = "") -> str:
    """Return a grammar as llguidance serialises it, if answers can follow it.

    Args:
        maker: the method of llguidance's LLMatcher that reads the text.
        text: the grammar.
        what: it is, for the error.
        options: JSON of another argument of the maker; empty: it has none.

    Raises:
        FsdError: a grammar that is malformed, not supported or too large, or that no text ends.
    """
    llguidance()
    if len(text) > MAX_TEXT:
        raise FsdError(f"the {what} has {len(text):,} characters, more than {MAX_TEXT:,}: give a shorter one.")
    answer = _CHILD.answer([maker, text, [LIMITS, *([json.loads(options)] if options else [])]])
    if "problem" in answer:
        raise FsdError(f"the {what} cannot be followed: {reason(answer['problem'])}")
    return answer["grammar"]


@lru_cache(maxsize=16)
def compiled(vocabulary: Any, grammar: str) -> Any:
    """Return llguidance's matcher of a grammar from :func:`serialised`, in its first state. Copy it before use.

    Raises:
        FsdError: a grammar of tokens that the vocabulary lacks.
    """
    library = llguidance()
    limits = library.LLParserLimits(**LIMITS)
    matcher = with_deep_stack(lambda: library.LLMatcher(vocabulary, grammar, limits=limits, log_level=0))
    if matcher.is_error():
        raise FsdError(f"the target's answers cannot follow the guide: {reason(matcher.get_error())}")
    return matcher


def with_deep_stack(make: Callable[[], _Result]) -> _Result:
    """Call a function in a thread with four times the stack of the child process, and return its result."""
    results: list[_Result] = []
    with _STACKS:
        before = threading.stack_size(4 * STACK)
        try:
            thread = threading.Thread(target=lambda: results.append(make()))
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if not results:
        raise FsdError("the grammar cannot be compiled; standard error says why.")
    return results[0]


def llguidance() -> Any:
    """Return the library. Raises FsdError if it is not installed."""
    return imported("llguidance", "structured output", "guided")


def reason(text: str) -> str:
    """Return the first line of a message of llguidance, shortened, and the line that explains it."""
    if TOO_DEEP in text:
        return "it is nested more than 127 levels deep."
    lines = [line for line in text.strip().splitlines() if line]
    explained = [line for line in lines[1:] if line.startswith("error:")]
    shown = [line if len(line) <= 300 else f"{line[:150]} ... {line[-150:]}" for line in [*lines[:1], *explained[:1]]]
    return " ".join(shown).replace("NoExtensionBias", "no token may follow.") or "unknown reason"


class GrammarProcess:
    """The process that tries grammars, started when the first one comes and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def answer(self, request: list[Any]) -> dict[str, str]:
        """Return what :func:`.grammar_child.try_grammar` does, or a problem: the process ended, or took too long."""
        late: list[bool] = []
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None

            def stop() -> None:
                late.append(True)
                process.kill()

            timer = threading.Timer(SECONDS, stop)
            timer.start()
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = b""
            finally:
                timer.cancel()
            if late or not line:  # a process that was killed just after its answer must not be asked again
                self.close()
            if line:
                return dict(json.loads(line))
        if late:
            return {"problem": f"trying it takes more than {SECONDS:g} seconds: give a simpler one."}
        return {
            "problem": f"it is too deep or too large. Up to {LEVELS:,} rules or references may follow each other: "
            "give a simpler one."
        }

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-I", "-c", _START, json.dumps(sys.path), str(_SCRIPT)]
            pipe = subprocess.PIPE
            try:
                with tempfile.TemporaryFile() as log:
                    self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log)
            except OSError as error:
                raise FsdError(f"structured output starts {sys.executable}, which failed: {error}.") from error
        return self._process


_SCRIPT = Path(__file__).with_name("grammar_child.py")
_STACKS = threading.Lock()
_CHILD = GrammarProcess()
atexit.register(_CHILD.close)
if hasattr(os, "register_at_fork"):  # a forked process starts a child of its own
    os.register_at_fork(after_in_child=_CHILD.__init__)  # type: ignore[misc]
