"""An sdist has its tests; its wheel, in an empty environment, decodes with and without a compiler, and trains."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fsd_infer.backends.cpu import sets


def call(command: list[str], directory: Path, status: int = 0, **own: str) -> str:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "CXX")}
    done = subprocess.run(command, cwd=directory, env=variables | own, capture_output=True, text=True, check=False)
    assert done.returncode == status, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def environment(directory: Path) -> str:
    """Create an empty environment and return its Python."""
    call([sys.executable, "-m", "venv", str(directory)], directory.parent)
    return str(directory / "bin" / "python")


@pytest.mark.slow
def test_wheel_decodes_and_trains(repo_root: Path, tmp_path: Path) -> None:
    tools, package = environment(tmp_path / "tools"), tmp_path / "package"
    call([tools, "-m", "pip", "install", "-q", "build", "twine"], tmp_path)
    call([tools, "-m", "build", "--outdir", str(package), str(repo_root)], tmp_path)  # the wheel is made of the sdist
    (sdist,), (wheel,) = package.glob("*.tar.gz"), package.glob("*.whl")
    call([tools, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    for path in ("tests/conftest.py", "docs/tutorial.md", "examples", "CHANGELOG.md", "data/spec_bench_dev.jsonl"):
        assert (source / path).exists(), path

    names = set(zipfile.ZipFile(wheel).namelist())
    for end in (
        "/cpu/kernels.cpp",
        "/cpu/native/layers.h",
        "fsd_train/commands/recipe.yaml.in",
        "fsd_bench/board.html",
    ):
        assert any(name.endswith(end) for name in names), end
    assert {f"{package}/py.typed" for package in ("fsd_core", "fsd_infer", "fsd_train", "fsd_bench")} <= names
    assert "fsd_train/shipped/recipes/template.yaml" in names
    assert not any(name.startswith(("tests", "benchmarks", "scripts")) for name in names)
    assert wheel.stat().st_size < 14e6, "the head of the built-in model, and no other weights"

    python = environment(tmp_path / "env")
    bin_ = Path(python).parent
    pip = [python, "-m", "pip", "install", "-q", "-c", str(repo_root / "requirements.lock")]
    call([*pip, str(wheel)], tmp_path)  # without extras
    ask = [str(bin_ / "fsd-infer"), "generate", "--prompt", "Why is the sky blue?", "--max-new-tokens", "32"]
    for path, lacks in ((str(bin_), True), (os.environ["PATH"], False)):  # without a C++ compiler, and with one
        answer = call(ask, tmp_path, PATH=path, FSD_CACHE=str(tmp_path / "cache"))
        assert "drafter eagle" in answer and "tokens per forward" in answer, "with the head that travels with it"
        assert ("there is no C++ compiler" in answer) == lacks or not sets.allowed_sets().names
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Name ten rivers."}\n')
    bench = "run --prompts prompts.jsonl --methods plain,exact --max-new-tokens 8"
    assert "tok/s" in call([str(bin_ / "fsd-bench"), *bench.split()], tmp_path)
    refused = call([str(bin_ / "fsd-train"), "quickstart"], tmp_path, status=2)
    assert refused.startswith("fsd-train quickstart: training is not installed") and refused.count("\n") == 1

    call([*pip, f"{wheel}[train]"], tmp_path)
    fit = "fit --config smollm2-135m --trainer.max_steps 4 --trainer.limit_val_batches 0 --model.unroll_steps 1"
    fit += " --data.train_files=[data/quickstart_answers.jsonl.gz] --data.features=null --data.max_length=256"
    call([str(bin_ / "fsd-train"), *fit.split(), "--data.batch_tokens", "1024"], tmp_path)
    trained = [str(bin_ / "fsd-infer"), "generate", "--drafter", "runs/smollm2-135m/head", "--prompt", "Hello"]
    assert "drafter eagle" in call([*trained, "--max-new-tokens", "8"], tmp_path)

    call([*pip, f"{wheel}[train,dev]"], tmp_path)
    call([python, "-m", "pytest", "-q", "tests/test_rules.py", "tests/test_tree.py", "tests/test_package.py"], source)
