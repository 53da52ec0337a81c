"""A wheel, installed into an empty environment outside of the checkout, decodes and trains."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def call(command: list[str], directory: Path) -> str:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=directory, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_wheel_decodes_and_trains(repo_root: Path, tmp_path: Path) -> None:
    call([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(repo_root)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {
        "fsd_train/shipped/recipes/template.yaml",
        "fsd_bench/evidence/page.py",
        "fsd_infer/cpu/kernels.cpp",
        "fsd_infer/cpu/native/layers.h",
    }
    assert {
        *shipped,
        "fsd_core/py.typed",
        "fsd_infer/py.typed",
        "fsd_train/py.typed",
        "fsd_train/commands/recipe.yaml.in",
    } <= names
    assert not any(name.startswith(("tests", "benchmarks", "scripts")) for name in names)

    call([sys.executable, "-m", "venv", "env"], tmp_path)
    bin_ = tmp_path / "env" / "bin"
    pip = [str(bin_ / "python"), "-m", "pip", "install", "-q", "-c", str(repo_root / "requirements.lock")]
    call([*pip, str(wheel)], tmp_path)  # without extras
    answer = call([str(bin_ / "fsd-infer"), "generate", "--prompt", "Why is the sky blue?"], tmp_path)
    assert "drafter eagle" in answer and "tau" in answer, "with the head that travels with it"

    call([*pip, f"{wheel}[train]"], tmp_path)
    fit = "fit --config smollm2-135m --trainer.max_steps 4 --trainer.limit_val_batches 0 --model.unroll_steps 1"
    fit += " --data.train_files=[data/smollm2-135m-answers.jsonl.gz] --data.features=null --data.max_length=256"
    call([str(bin_ / "fsd-train"), *fit.split(), "--data.batch_tokens", "1024"], tmp_path)
    trained = [str(bin_ / "fsd-infer"), "generate", "--drafter", "runs/smollm2-135m/head", "--prompt", "Hello"]
    assert "drafter eagle" in call([*trained, "--max-new-tokens", "8"], tmp_path)
