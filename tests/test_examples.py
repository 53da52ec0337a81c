"""The scripts of examples/ run as they are printed, on three layers of the built-in model and a few of its rows.

Only stories.py runs on toys.
"""

from __future__ import annotations

import gzip
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsd_infer.rules import RULES
from fsd_train.callbacks import DecodedTau
from fsd_train.cli import main
from tests.bench_toys import Toy
from tests.loopback_hub import loopback_hub

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
LONGEST = {"stories": 60}
ROWS = 4  # of each file of data/: a head that nobody uses needs no more


@pytest.fixture(scope="module")
def root(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the examples/ and the beginnings of the files of data/ that they read."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(repo_root / "examples", root / "examples")
    (root / "data").mkdir()
    for name, read in (("quickstart_prompts.jsonl", open), ("smollm2-135m-answers.jsonl.gz", gzip.open)):
        with read(repo_root / "data" / name, "rt") as whole, read(root / "data" / name, "wt") as few:
            few.writelines(line for _, line in zip(range(ROWS), whole))
    return root


def in_full_precision(argv: list[str]) -> int:
    """`fsd-train` that trains in fp32: bf16 takes six times as long on a CPU without AVX-512."""
    return main([*argv, "--trainer.precision", "32-true"] if argv[0] == "fit" else argv)


@pytest.mark.usefixtures("cut_builtin")
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(
    script: Path, toy: Toy, repo_root: Path, root: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In this process, where torch is loaded already; a process of its own takes twice the time."""
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(EXAMPLES) == 9 and len(lines) <= LONGEST.get(script.stem, 30)
    small = ["--target", str(toy.target), "--drafter", str(toy.drafter)] if script.stem == "stories" else []
    monkeypatch.setattr("sys.argv", [str(script), *small])
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))  # a rule of an example's own
    monkeypatch.setenv("PYTHONPATH", str(repo_root))  # for a server that one starts
    monkeypatch.setattr("tempfile.tempdir", str(here))
    monkeypatch.setattr("fsd_train.cli.main", in_full_precision)
    # what a run decodes at its end, and a calibration's page, have tests of their own
    monkeypatch.setattr(DecodedTau, "measure", lambda callback, *given: {f"decoded_tau/{callback.rules[0]}": 1.0})
    monkeypatch.setattr("fsd_bench.sweep.calibrate.write_page", lambda *given: None)
    with loopback_hub() as hub:
        if "hub" in script.stem:
            hub.serve_this_process(monkeypatch, here / "cache")
            monkeypatch.setenv("HF_TOKEN", "hf_x")
        runpy.run_path(str(root / "examples" / script.name), run_name="__main__")
    assert capsys.readouterr().out.strip()
