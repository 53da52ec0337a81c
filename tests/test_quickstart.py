"""`fsd-train quickstart` on a tiny saved model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fsd_infer.drafters import loading
from fsd_train import repository
from fsd_train.cli import main
from fsd_train.commands import quickstart
from fsd_train.commands.fit import with_recipes
from tests.bench_toys import Toy


def test_quickstart_compares_the_methods(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # outside of a checkout
    monkeypatch.setattr(quickstart, "TARGET", str(toy.target))
    monkeypatch.setattr(quickstart, "builtin_dir", lambda name: toy.target)
    for module in (quickstart, loading):
        monkeypatch.setattr(module, "shipped_drafter", lambda name: toy.drafter)
    assert main(["quickstart", "--train-seconds", "0", "--prompts", "2", "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert all(method.split("=")[0] in out for method in quickstart.METHODS) and "nats spent" in out
    record = json.loads((tmp_path / quickstart.OUTPUT / "bench.json").read_text())
    assert len(record["prompts"]) == 2 and record["settings"]["max_new_tokens"] == 4


def test_quickstart_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "shipped_drafter", lambda name: None)
    assert main(["quickstart"]) == 2
    assert "no trained head for smollm2-135m" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(repository, "SHIPPED", tmp_path / "site-packages" / "fsd_train" / "shipped")
    assert main(["quickstart"]) == 2
    assert "recipes/smollm2-135m.yaml is missing" in capsys.readouterr().err


def test_quickstart_training_overrides_fit_the_recipe(
    repo_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    with pytest.raises(SystemExit) as stop:
        main([*quickstart.train_command(75)[3:], "--print_config"])
    assert stop.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["trainer"]["max_time"] == {"seconds": 75}
    assert config["data"]["train_files"] == [str(quickstart.ANSWERS)] and config["data"]["features"] is None
    assert config["trainer"]["logger"]["init_args"]["save_dir"] == str(quickstart.OUTPUT)
    assert len(config["trainer"]["callbacks"]) == 2 and config["model"]["init_args"]["target"] == quickstart.TARGET


def test_recipes_are_found_by_name(repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = str(repo_root / "recipes" / "smollm2-135m.yaml")
    for given, found in [
        (["--config", "smollm2-135m"], ["--config", recipe]),
        (["-c", "recipes/smollm2-135m.yaml"], ["-c", recipe]),
        (["--config=smollm2-135m"], [f"--config={recipe}"]),
    ]:
        rest = ["--model.lr", "smollm2-135m"]
        assert with_recipes(["fit", *given, *rest]) == ["fit", *found, *rest]
    (tmp_path / "smollm2-135m").touch()
    assert with_recipes(["--config", "smollm2-135m", "--config", "none"])[1::2] == ["smollm2-135m", "none"]
