"""The first hour on a GPU: its commands are commands."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from benchmarks import compare, first_gpu
from fsd_infer.cli.main import build_parser
from fsd_train.commands.fit import read_recipe


def test_the_commands_for_a_gpu_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals run others with toys: here their options are read as the programs read them."""
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    sizes = first_gpu.full(argparse.Namespace(tinyllama="models/tinyllama"), tmp_path)
    parsers = {"fsd_infer.cli.main": build_parser(), "benchmarks.compare": compare.build_parser()}
    steps = [step for step in first_gpu.steps_of(sizes, tmp_path) if step.words[1] in parsers]
    read = {step.name: parsers[step.words[1]].parse_args(step.words[2:]) for step in steps}
    assert len(read) == 5 and read["tinyllama-graphs"].cuda_graphs and not read["tinyllama"].cuda_graphs
    assert Path(read["tinyllama"].drafter) == tmp_path / "tinyllama" / "head"
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.model["target"] == read["tinyllama"].target == "models/tinyllama"
    assert recipe.trainer["default_root_dir"] == str(tmp_path / "tinyllama")
    assert f"directory: {tmp_path}/tinyllama/head" in (tmp_path / "recipe.yaml").read_text()
    assert recipe.data["train_files"] == ["data/tinyllama-1.1b-answers.jsonl.gz"]
