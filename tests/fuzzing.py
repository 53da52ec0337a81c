"""What the fuzz tests share: odd numerals, words and JSON, and what an error has to look like."""

from __future__ import annotations

import copy
import json
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
COUNTS = st.sampled_from([1, 2, 40, 128, 1000, 2500, 6000])  # links of a chain, alternatives, brackets, repetitions
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


@st.composite
def grammars(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a maker of :class:`.Guide` and its text: chains, long alternatives, deep brackets, counts and loops."""
    n = draw(COUNTS)
    before, after = draw(
        st.sampled_from([("", ""), ('"a" ', ""), ("", ' "b"'), ('"a" ', ' "b"'), ("(", ")?"), ("", " | /c+/")])
    )
    last = draw(st.sampled_from(['"x"', "/[a-z]+/", "r0", "/a/ & /b/", "/[^\\s\\S]/", "%json {}", ""]))
    open_, close = draw(
        st.sampled_from([("(", ")"), ("[", "]"), ("(", ")?"), ("(a|", ")"), ("(", "){1,9}"), ("~(", ")")])
    )
    link = draw(st.sampled_from([{}, {"type": "array"}, {"minItems": 1}, {"type": ["array", "null"]}]))
    key = draw(st.sampled_from(["$ref", "items", "allOf", "anyOf", "oneOf", "properties", "prefixItems"]))
    some = {"type": "boolean"}
    optional = {f"p{i}": some for i in range(min(n, 1000))}
    return draw(
        st.sampled_from(
            [
                ("lark", f"start: r0\n{_rules(n, before, after)}r{n}: {last}"),
                ("lark", f"start: T0\n{_rules(n, before, after).replace('r', 'T')}T{n}: {last.replace('r', 'T')}"),
                ("lark", "start: " + " | ".join(f'"{i}" {last}' for i in range(n)) + '\nr0: "y"'),
                ("lark", "start: " + " ".join(f'"{i}"' for i in range(n))),
                ("lark", f"start: ({last}){{{n}}}\nr0: {last}"),
                ("lark", f"start: {open_ * n}{last}{close * n}"),
                ("regex", f"{open_ * n}a{close * n}"),
                ("regex", f"(a{{1,{n}}}){{1,{n}}}"),
                ("regex", "|".join(f"a{i}" for i in range(n))),
                ("json_schema", json.dumps(_references(n, key, link))),
                ("json_schema", '{"items": ' * n + "{}" + "}" * n),
                ("json_schema", json.dumps({"type": "object", "properties": optional})),
                ("json_schema", json.dumps({"enum": [f"v{i}" for i in range(n)]})),
                ("json_schema", json.dumps({"anyOf": [{"const": i} for i in range(n)]})),
                ("json_schema", json.dumps({"type": "array", "items": some, "minItems": n, "maxItems": n})),
                ("json_schema", f'{{"type": "integer", "multipleOf": {n}, "minimum": -1, "maximum": 1{"0" * n}}}'),
                ("lark", draw(st.text('abr():|"/[]{}+*?~&%<> \n01,.', max_size=40)).replace("ab", "start: ")),
            ]
        )
    )


def _rules(count: int, before: str, after: str) -> str:
    return "".join(f"r{i}: {before}r{i + 1}{after}\n" for i in range(count))


def _references(count: int, key: str, more: dict[str, Any]) -> dict[str, Any]:
    """A chain of definitions by one keyword of JSON Schema; without a link at its end, or with one to its start."""

    def link(to: int) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/d{to}"}
        lists: dict[str, Any] = {"$ref": ref["$ref"], "items": ref, "properties": {"a": ref}}
        return {key: lists.get(key, [ref]), **more}

    last = {"type": "null"} if count % 2 else link(0)
    return {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": link(i + 1) for i in range(count)}, f"d{count}": last}}


@st.composite
def half_requests(draw: st.DrawFn) -> bytes:
    """Draw what a client sends before it stalls: a request that ends early, says too much or is none."""
    body = draw(st.sampled_from([b"{", b'{"messages": [', b"[" * 3000, b"\xff" * 9, b"5\r\n{", b"fffffffff\r\n"]))
    headers = draw(
        st.lists(
            st.sampled_from(
                [
                    "Host: localhost", "Content-Type: application/json", "Content-Length: 9000", "Expect: 100-continue",
                    "Transfer-Encoding: chunked", "Content-Length: -1", "Connection: upgrade", "Upgrade: websocket",
                    "Content-Length: 7", "X: " + "x" * 9000, ": ", "Host: evil.example", "Authorization: Bearer",
                ]
            ),
            max_size=4,
        )
    )  # fmt: skip
    line = draw(
        st.sampled_from(["POST /v1/chat/completions HTTP/1.1", "GET / HTTP/1.0", "PRI * HTTP/2.0", "\x16\x03\x01"])
    )
    text = "\r\n".join([line, *headers, "", ""]).encode() + body
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
