"""What the fuzz tests share: odd numerals, words and JSON, and what an error has to look like."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fsd_core.errors import FsdError

FUZZ = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
NUMERALS = [
    *("0", "1", "2", "7", "-1", "-0", "+1", "007", "0.3", ".5", "5.", "1e-3", "1e400", "-1e400", "1e-400", "5e-324"),
    *("1e-300", "1e308", "nan", "inf", "-inf", "Infinity", "1_0", "0_1", " 1", "1 ", "1\n", "\u0661", "\uff11", "0x1"),
    *("1,5", "1e", "e1", "--1", "1j", "4611686018427387905", "9" * 21, "9" * 400, "9" * 5000, "-" + "9" * 5000),
    *("1" + "0" * 5000 + ".5", "2147483648"),
]  # fmt: skip
WORDS = [
    *("", " ", ":", "=", "::", ",", "@", "+", "none", "None", "true", "auto", "raw", "processed", "x" * 5000),
    *("\0", "a\0b", "\ud800", "\udc80", "\u202e", "\ufeff", "é", "\U0001f600", "../x", "/", "//", ".", "~"),
    *("~nobody/x", "%s%n", "{}", "[]", "-", "--", "__class__", "name", "*", "\x1b[31m", "\r\n", "lookup", "recycle"),
    *("lookup+lookup", "+lookup", "none+", "cpu:7", "cpu:-1", "meta", "abacus", "1,2,3", "5,6,16,2", "999999,2,4"),
    *("256,256,2", "0,0,0", "5,6", "1,1,2,inf"),
]  # fmt: skip
values = st.sampled_from(NUMERALS) | st.sampled_from(WORDS) | st.text(max_size=8)
JUNK: list[Any] = [
    None, True, -1, 0, 1.5, 10**9, 2**63, 10**40, float("nan"), float("inf"), "", "32", "x" * 300, "\ud800", [], [[]],
    {}, {"a": 1}, [1, None], -(10**9), 1e308, ["LlamaForCausalLM"], [3, 1], [1, 1], [-2, 1, 2], [0.5], ["1"], [10**9],
]  # fmt: skip
_OTHERS = st.sampled_from([*JUNK, KeyError]) | st.recursive(st.none() | st.integers() | st.text(), st.lists)


def called(main: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, out.getvalue(), err.getvalue()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A JSON value with ``new`` at a path; KeyError: nothing is there any more."""
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if new is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return made


def spoilt(value: Any, draw: st.DrawFn) -> Any:
    """A JSON value with something within it replaced or removed."""
    return changed(value, draw(st.sampled_from(places(value))), draw(_OTHERS))


def one_line(message: str) -> None:
    """Fails unless this can be shown in one line of some length."""
    assert message.strip() and "Traceback" not in message and len(message.split("\n")) <= 3, message


def refusal(what: Callable[[], Any]) -> FsdError | None:
    """The error it ends in, None if it does not. Any other error is a failure."""
    try:
        what()
    except FsdError as error:
        one_line(str(error))
        return error
    return None
