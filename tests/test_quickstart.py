"""`fsd-train quickstart` on a toy target: its table and record, what is missing, its training."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from fsd_infer.drafters import loading
from fsd_train import repository
from fsd_train.cli import main
from fsd_train.commands import quickstart
from tests.bench_toys import Toy


def test_quickstart_compares_the_methods(
    toy: Toy, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "TARGET", str(toy.target))
    monkeypatch.setattr(quickstart, "builtin_dir", lambda name: toy.target)
    for module in (quickstart, loading):
        monkeypatch.setattr(module, "shipped_drafter", lambda name: toy.drafter)
    assert main(["quickstart", "--train-seconds", "0", "--prompts", "2", "--max-new-tokens", "4"]) == 0
    out = capsys.readouterr().out
    assert all(method.split("=")[0] in out for method in quickstart.METHODS) and "--details" in out
    assert re.split(r"  +", out.splitlines()[0]) == [
        "method", "tok/s", "x hf-generate", "tokens per forward", "nats per token",
    ]  # fmt: skip
    record = json.loads((here / quickstart.OUTPUT / "bench.json").read_text())
    assert len(record["prompts"]) == 2 and record["settings"]["max_new_tokens"] == 4


def test_quickstart_names_what_is_missing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "builtin_dir", lambda name: pytest.fail("nothing is fetched before"))
    with monkeypatch.context() as without:
        without.setattr(quickstart.importlib.util, "find_spec", lambda name: None)
        assert main(["quickstart"]) == 2
    assert "pip install 'fsd-toolkit[train]', or use --train-seconds 0" in capsys.readouterr().err
    monkeypatch.setattr(quickstart, "shipped_drafter", lambda name: None)
    assert main(["quickstart"]) == 2
    assert "no trained head for smollm2-135m" in capsys.readouterr().err
    monkeypatch.setattr(repository, "SHIPPED", here / "site-packages" / "fsd_train" / "shipped")
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
    assert config["trainer"]["max_time"] == "00:00:01:15"
    assert config["data"]["train_files"] == [str(quickstart.ANSWERS)] and config["data"]["features"] is None
    assert config["trainer"]["logger"]["init_args"]["save_dir"] == str(quickstart.OUTPUT)
    assert len(config["trainer"]["callbacks"]) == 2 and config["model"]["init_args"]["target"] == quickstart.TARGET
