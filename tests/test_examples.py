"""The scripts of examples/ run as they are printed, on the built-in model (stories.py on toys)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench_toys import Toy
from tests.loopback_hub import loopback_hub

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
LONGEST = {"stories": 60}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(script: Path, toy: Toy, builtin_target_dir: Path, repo_root: Path, tmp_path: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(EXAMPLES) == 8 and len(lines) <= LONGEST.get(script.stem, 30)
    small = ["--target", str(toy.target), "--drafter", str(toy.drafter)] if script.stem == "stories" else []
    with loopback_hub() as hub:
        reached = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": "hf_x"}
        variables = {**os.environ, "PYTHONPATH": str(repo_root), **(reached if "hub" in script.stem else {})}
        done = subprocess.run(
            [sys.executable, str(script), *small], cwd=tmp_path, env=variables, capture_output=True, text=True
        )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
