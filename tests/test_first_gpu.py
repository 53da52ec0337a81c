"""The first hour on a GPU: steps that fail, run out of time or are killed, and commands that do exist."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, first_gpu, gpu
from benchmarks.first_gpu import Step, run_steps
from fsd_infer.cli.main import build_parser
from fsd_train.fit import read_head_recipe

KILLS = """
import os, pathlib, signal
if not pathlib.Path({mark!r}).exists():
    pathlib.Path({mark!r}).touch()
    os.kill(os.getppid(), signal.SIGKILL)
"""


def go(home: Path) -> None:
    """Steps of which one fails, one takes too long and one kills its runner the first time."""

    def step(name: str, code: str = "", seconds: float = 60.0, missing: str = "") -> Step:
        words = ["-c", f"print({name!r}, file=open({str(home / 'ran')!r}, 'a'))\n{code}"]
        return Step(name, f"what {name} shows", words, seconds / 60, missing=missing)

    file = home / "record.json"
    record = json.loads(file.read_text()) if file.exists() else {}
    steps = [
        step("good"),
        step("fails", "raise SystemExit('no such thing')"),
        step("slow", "import time; time.sleep(100)", seconds=1.0),
        step("absent", missing="not installed"),
        step("kills", KILLS.format(mark=str(home / "killed"))),
        step("last"),
    ]
    run_steps(steps, home, record, lambda found: file.write_text(json.dumps(found)) and None)


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    def run() -> tuple[int | None, list[str], dict[str, Any]]:
        (tmp_path / "ran").write_text("")
        runner = multiprocessing.get_context("fork").Process(target=go, args=(tmp_path,))
        runner.start()
        runner.join()
        record = json.loads((tmp_path / "record.json").read_text())["steps"]
        return runner.exitcode, (tmp_path / "ran").read_text().split(), record

    status, ran, _ = run()
    assert status == -signal.SIGKILL and ran == ["good", "fails", "slow", "kills"]
    status, ran, record = run()
    assert status == 0 and ran == ["kills", "last", "fails", "slow"]  # what was not tried yet comes first
    assert {name: found["status"] for name, found in record.items()} == {
        "good": "done", "fails": "failed", "slow": "out of time", "absent": "left out", "kills": "done", "last": "done",
    }  # fmt: skip
    assert record["fails"]["tail"] == ["no such thing"] and record["absent"]["reason"] == "not installed"
    assert run()[1] == ["fails", "slow"]
    where = {"gpu": "toy", "torch": "2", "transformers": "5", "commit": "c", "command": "first"}
    page = first_gpu.page({"rehearsal": False, "environment": where, "steps": record})
    assert "| slow | what slow shows | out of time |" in page and "absent shows: not installed | left out | –" in page
    assert "no such thing" in page


def test_the_commands_for_a_gpu_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals run others with toys: here their options are read as the programs read them."""
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    sizes = first_gpu.full(argparse.Namespace(tinyllama="models/tinyllama"), tmp_path)
    parsers = {
        "fsd_infer.cli.main": build_parser(), "benchmarks.gpu": gpu.build_parser(),
        "benchmarks.compare": compare.build_parser(),
    }  # fmt: skip
    read = {}
    for step in first_gpu.steps_of(sizes, tmp_path):
        if step.words[1] in parsers:
            read[step.name] = parsers[step.words[1]].parse_args(step.words[2:])
    assert len(read) == 6 and read["graphs-on"].cuda_graphs and not read["graphs-off"].cuda_graphs
    assert Path(read["tinyllama"].drafter) == tmp_path / "tinyllama" / "head"
    recipe = read_head_recipe(tmp_path / "recipe.yaml")
    assert recipe["model"]["target"] == read["tinyllama"].target == "models/tinyllama"
    assert recipe["trainer"]["default_root_dir"] == str(tmp_path / "tinyllama")
    assert f"directory: {tmp_path}/tinyllama/head" in (tmp_path / "recipe.yaml").read_text()
    assert recipe["data"]["train_files"] == ["data/tinyllama-1.1b-answers.jsonl.gz"]


def test_the_rehearsal_came_to_its_end(repo_root: Path) -> None:
    """Its record says of every step how it went; toys need neither vLLM nor DeepSpeed."""
    record = json.loads((repo_root / "benchmarks" / "results" / "first-gpu-rehearsal.json").read_text())
    sizes = first_gpu.Sizes([], [], [], [], [], 1.0, [])
    assert list(record["steps"]) == [step.name for step in first_gpu.steps_of(sizes, Path("."))]
    left_out = {name for name, found in record["steps"].items() if found["status"] == "left out"}
    assert left_out <= {"vllm", "deepspeed"}
    assert all(found["status"] == "done" for name, found in record["steps"].items() if name not in left_out)
