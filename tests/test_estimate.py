"""`fsd-train estimate` says what a recipe needs, and refuses one that the disk cannot hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsd_train import features
from fsd_train.cli import main as cli
from tests.train_toys import make_toys


def recipe(root: Path, **data: Any) -> Path:
    sections = {
        "trainer": {"accelerator": "cpu", "max_steps": 1000, "accumulate_grad_batches": 2},
        "model": {"target": str(root / "target"), "head": {"fused_layers": [0]}, "unroll_steps": 2},
        "data": {"train_files": [str(root / "answers.jsonl")], "validation_fraction": 0.0, "batch_tokens": 64, **data},
    }
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def test_a_recipe_is_estimated(tmp_path: Path, capsys: Any) -> None:
    root = make_toys(tmp_path)
    assert cli(["estimate", "--config", str(recipe(root, features=str(root / "not-yet")))]) == 0
    found = capsys.readouterr().out
    tokens = int(re.search(r"48, (\d+) tokens", found)[1])  # type: ignore[index]
    disk = float(re.search(r"disk for features +([\d.]+) MB", found)[1])  # type: ignore[index]
    assert disk == pytest.approx(tokens * 2 * 2 * 32 / 1e6, abs=0.006)
    assert "1000 steps" in found and f"about {2000 * 64 / tokens:.1f} epochs" in found
    assert "time to cache features" in found and "memory per device" in found
    path = recipe(root, features=str(root / "features"))
    path.write_text(path.read_text().replace("fused_layers:\n    - 0", "num_layers: 1"))
    assert cli(["estimate", "--config", str(path)]) == 0
    assert "disk" not in capsys.readouterr().out  # they are there


def test_a_recipe_that_the_disk_cannot_hold(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_toys(tmp_path)
    monkeypatch.setattr(features, "_DISK_RESERVE", 2**60)
    assert cli(["estimate", "--config", str(recipe(root, features=str(root / "not-yet")))]) == 2
    assert "GB free" in capsys.readouterr().err


def test_what_is_no_recipe(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipe.yaml").write_text("model: 3")
    assert cli(["estimate", "--config", str(tmp_path / "recipe.yaml")]) == 2
    assert "not a head's recipe" in capsys.readouterr().err
