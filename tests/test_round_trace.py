"""How much a reader of one round has to follow: which functions it calls across our files, by a trace."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fsd_core import functional
from fsd_infer.drafters import TreeShape
from fsd_infer.engine import Request, decode, loop
from fsd_infer.rules import parse_rule
from fsd_infer.targets.target import Target
from tests.families import tiny_head, tiny_model

PACKAGES, BACKENDS = ("fsd_core/", "fsd_infer/"), "fsd_infer/backends/"
WATCHING = {f"fsd_infer/engine/{name}.py" for name in ("callbacks", "tracker")} | {
    "fsd_infer/device/clock.py"
}  # of phases
Call = tuple[str, str, str]  # from a file, to a file's function


@contextmanager
def traced(root: Path, calls: set[Call], packages: tuple[str, ...] = PACKAGES) -> Iterator[None]:
    """Note every call of a function of ours from another file of ours, through torch and transformers if need be.

    What a backend puts in the place of a function or a module counts as that.
    """

    def file_of(frame: FrameType) -> str:
        file = frame.f_code.co_filename.removeprefix(f"{root}/")
        return file if file.startswith(packages) and not file.startswith(BACKENDS) else ""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and file_of(frame):
            caller = frame.f_back
            while caller is not None and not file_of(caller):
                caller = caller.f_back
            if caller is not None and file_of(caller) != file_of(frame):
                calls.add(
                    (file_of(caller), file_of(frame), f"{frame.f_code.co_name}, line {frame.f_code.co_firstlineno}")
                )

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("layout", "rule", "files", "functions"), [
    ("eagle3", "exact", 13, 42), ("fsd", "exact", 13, 43), ("eagle3", "fuzzy:js:0.3", 16, 53),
])  # fmt: skip
def test_a_greedy_round_is_short_to_follow(
    layout: str, rule: str, files: int, functions: int, repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round with a tree of 60 nodes by torch alone, once the request has begun: at most so many of ours."""
    for kernels in functional.KERNELS.values():  # those of a backend that other tests have loaded
        monkeypatch.delitem(kernels, "cpu", raising=False)
    whole, rounds, calls = Target(tiny_model("llama")), 0, set[Call]()
    decode_round = loop.decode_round

    def run(state: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds != 3:
            return decode_round(state)
        with traced(repo_root, calls):
            return decode_round(state)

    monkeypatch.setattr(loop, "decode_round", run)
    fused = {} if layout == "eagle3" else {"fused_layers": [0]}
    head = tiny_head(whole, TreeShape(depth=6, width=10, nodes=60), layout=layout, **fused)
    decode(whole, head, parse_rule(rule), Request([[7, 8, 9, 1]], 30, True))
    called = {(file, name) for _, file, name in calls}
    assert 30 < len(called) <= functions, sorted(called)
    assert len({file for file, _ in called} - WATCHING) <= files
    direct = {file for caller, file, _ in calls if caller == "fsd_infer/engine/round.py"}
    assert len(direct - WATCHING) <= 8, "what draft, verify, accept, commit and advance call themselves"
