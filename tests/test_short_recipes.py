"""Short recipes, keys of recipes that do not exist, and modules of one's own."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from fsd_core.errors import FsdError
from fsd_train.commands.fit import configured, read_recipe
from fsd_train.commands.recipe_keys import check, keys_of
from fsd_train.commands.short_recipe import expanded, written_out
from fsd_train.data.module import AnswersDataModule
from fsd_train.models import DistillationModule, EagleModule, HeadOptions, LMModule, WarmupCosine

SHORT = {
    "output_dir": "runs/mine", "save_steps": 20, "resume": "auto", "num_epochs": 3, "warmup_ratio": 0.25,
    "trainer": {"accumulate_grad_batches": 2, "limit_val_batches": 4},
    "model": {"target": "smollm2-135m"}, "data": {"train_files": ["answers.jsonl"]},
}  # fmt: skip


def written(directory: Path, recipe: Any) -> str:
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_keys_that_are_read_from_sources_are_those_of_the_classes() -> None:
    def arguments(*kinds: Any) -> set[str]:
        named = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
        return named - {"self", "training"}

    assert keys_of("trainer") == arguments(Trainer)
    assert keys_of("data") == arguments(AnswersDataModule)
    assert keys_of("model.head") == {field.name for field in fields(HeadOptions)}
    for kind in (EagleModule, LMModule):
        assert keys_of(f"model.{kind.__name__}") == arguments(DistillationModule, kind)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"trainer": {"max_stepz": 3}}, "recipe.yaml: there is no trainer.max_stepz. Did you mean 'max_steps'?"),
    ({"trainer": {"batch_tokens": 3}}, "there is no trainer.batch_tokens: batch_tokens stands in the section data."),
    ({"max_steps": 3}, "there is no max_steps: max_steps stands in the section trainer."),
    ({"data": {"output_dir": "x"}}, "there is no data.output_dir: output_dir stands at the top level."),
    ({"model": {"head": {"layuot": "fsd"}}}, "there is no model.head.layuot. Did you mean 'layout'?"),
    ({"model": {"class_path": "fsd_train.models.LMModule", "init_args": {"draftr": "x"}}}, "mean 'drafter'?"),
    ({"model": {"learning_rate": 3}}, "there is no model.learning_rate: here it is model.optimizer.init_args.lr."),
    ({"tp_size": 2}, "there is no tp_size: here it is trainer.strategy: fsdp"),
]


@pytest.mark.parametrize(("recipe", "said"), MISTAKES)
def test_a_misspelt_key_is_named_with_its_section(recipe: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(FsdError) as found:
        check(["--config", written(tmp_path, recipe)])
    assert said in str(found.value)
    check(["--config", written(tmp_path, SHORT), "--trainer.max_steps", "3", "--model.class_path=x", "--data.seed=1"])
    check(["--config", written(tmp_path, {"model": {"class_path": "mine.Module", "init_args": {"anything": 1}}})])


def test_it_is_named_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from fsd_train.cli import main; status = main(['fit', '--config', sys.argv[1]]); "
        "assert status == 2 and not {'torch', 'lightning', 'jsonargparse'} & sys.modules.keys(), status"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, written(tmp_path, {"modl": {}})], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "there is no modl. Did you mean 'model'?" in done.stderr, done.stderr


def test_a_short_recipe_stands_for_a_long_one(tmp_path: Path) -> None:
    long = expanded(SHORT)
    assert long["ckpt_path"] == "auto" and "output_dir" not in long
    trainer = read_recipe(written(tmp_path, SHORT)).trainer
    assert trainer["max_epochs"] == 3 and trainer["max_steps"] == -1 and trainer["val_check_interval"] == 40
    assert trainer["limit_val_batches"] == 4 and trainer["default_root_dir"] == "runs/mine"
    found = {each["class_path"].rpartition(".")[2]: each.get("init_args", {}) for each in trainer["callbacks"]}
    assert list(found) == ["ModelCheckpoint", "ExportHead", "DecodedTau", "LossCurve", "TokenRate"]
    assert found["ExportHead"]["directory"] == "runs/mine/head" and found["DecodedTau"]["every_n_train_steps"] == 80
    own = {"class_path": "fsd_train.callbacks.ExportHead", "init_args": {"directory": "elsewhere"}}
    mixed = expanded({**SHORT, "trainer": {"callbacks": [own]}})["trainer"]["callbacks"]
    assert [each for each in mixed if each["class_path"].endswith("ExportHead")] == [own]


def test_the_same_keys_are_options(tmp_path: Path) -> None:
    recipe = written(tmp_path, SHORT)
    words, modules = written_out(["--config", recipe, "--output_dir", "runs/other", "--import=mine", "--strict"])
    assert words[2:] == ["--data.strict=true"] and modules == ["mine"]
    assert yaml.safe_load(words[1])["trainer"]["default_root_dir"] == "runs/other"
    mistakes = (("output_dir", 3, "is a path"), ("num_epochs", 0, "at least 1"), ("save_steps", 2, "needs output_dir"))
    for key, wrong, said in mistakes:
        with pytest.raises(FsdError, match=said):
            expanded({key: wrong})


def test_a_warm_up_by_share_ends_there() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = WarmupCosine(optimizer, warmup_ratio=0.25, final_lr=1.0)
    schedule.follow(lambda step: step / 40)
    rates = []
    for _ in range(20):
        rates.append(float(schedule.get_lr()[0]))
        schedule.last_epoch += 1
    assert rates == pytest.approx([min((step + 1) / 10, 1.0) for step in range(20)])


OWN_LOSS = """
from fsd_train.losses import LOSSES, EagleLoss


@LOSSES.register("{name}")
class Own(EagleLoss):
    pass
"""


def test_a_loss_of_ones_own_is_imported_by_name_by_recipe_and_by_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    for module, name in (("by_option", "own-option"), ("by_recipe", "own-recipe"), ("by_package", "own-package")):
        (tmp_path / f"{module}.py").write_text(OWN_LOSS.format(name=name))
    installed = tmp_path / "site" / "mine-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[fsd_toolkit.plugins]\nmine = by_package\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    recipe = {**SHORT, "import": ["by_recipe"], "trainer": {"accelerator": "cpu", "max_steps": 1}}
    path = written(tmp_path, recipe)
    assert read_recipe(path).model["target"] == "smollm2-135m"
    for loss in ("own-option", "own-recipe", "own-package"):
        made = configured(["--config", path, "--import", "by_option", "--model.loss", loss])
        assert type(made.model.loss).__name__ == "Own"
    with pytest.raises(FsdError, match="--import nothing_here: ModuleNotFoundError"):
        configured(["--config", path, "--import", "nothing_here"])
