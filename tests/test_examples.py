"""The scripts of examples/ run as they are printed, on the built-in model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(script: Path, builtin_target_dir: Path, repo_root: Path, tmp_path: Path) -> None:
    assert len(EXAMPLES) == 5 and len(script.read_text(encoding="utf-8").splitlines()) <= 30
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(repo_root)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
