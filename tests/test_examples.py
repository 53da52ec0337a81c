"""The scripts of examples/ run as they are printed, on three layers of the built-in model (stories.py on toys)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from fsd_infer.rules import RULES
from tests.bench_toys import Toy
from tests.loopback_hub import loopback_hub

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
LONGEST = {"stories": 60}


@pytest.mark.usefixtures("cut_builtin")
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(
    script: Path, toy: Toy, repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In this process, where torch is loaded already; a process of its own takes twice the time."""
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(EXAMPLES) == 9 and len(lines) <= LONGEST.get(script.stem, 30)
    small = ["--target", str(toy.target), "--drafter", str(toy.drafter)] if script.stem == "stories" else []
    monkeypatch.setattr("sys.argv", [str(script), *small])
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))  # a rule of an example's own
    monkeypatch.setenv("PYTHONPATH", str(repo_root))  # for a server that one starts
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with loopback_hub() as hub:
        if "hub" in script.stem:
            hub.serve_this_process(monkeypatch, tmp_path / "cache")
            monkeypatch.setenv("HF_TOKEN", "hf_x")
        runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
