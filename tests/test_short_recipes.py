"""Short recipes, keys of recipes that do not exist, and modules of one's own."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from fsd_core.errors import FsdError
from fsd_train.commands.fit import _RecipeReader, configured, read_recipe
from fsd_train.commands.recipe_keys import check, keys_of
from fsd_train.commands.short_recipe import written_out
from fsd_train.data.module import AnswersDataModule
from fsd_train.models import (
    BlockModule,
    DistillationModule,
    EagleModule,
    HeadOptions,
    LMModule,
    MtpModule,
    WarmupCosine,
)

SHORT = {
    "output_dir": "runs/mine", "save_steps": 20, "resume": "auto", "num_epochs": 3, "warmup_ratio": 0.25,
    "trainer": {"accumulate_grad_batches": 2, "limit_val_batches": 4},
    "model": {"target": "smollm2-135m"}, "data": {"train_files": ["answers.jsonl"]},
}  # fmt: skip


def written(directory: Path, recipe: Any, name: str = "recipe.yaml") -> str:
    path = directory / name
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_keys_that_are_read_from_sources_are_those_of_the_classes() -> None:
    def arguments(*kinds: Any) -> set[str]:
        named = {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}
        return named - {"self", "training"}

    assert keys_of("trainer") == arguments(Trainer)
    assert keys_of("data") == arguments(AnswersDataModule)
    assert keys_of("model.head") == {field.name for field in fields(HeadOptions)}
    for kind in (EagleModule, LMModule, BlockModule, MtpModule):
        assert keys_of(f"model.{kind.__name__}") == arguments(DistillationModule, kind)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"trainer": {"max_stepz": 3}}, "recipe.yaml: there is no trainer.max_stepz. Did you mean 'max_steps'?"),
    ({"trainer": {"batch_tokens": 3}}, "there is no trainer.batch_tokens: batch_tokens stands in the section data."),
    ({"max_steps": 3}, "there is no max_steps: max_steps stands in the section trainer."),
    ({"data": {"output_dir": "x"}}, "there is no data.output_dir: output_dir stands at the top level."),
    ({"model": {"head": {"layuot": "fsd"}}}, "there is no model.head.layuot. Did you mean 'layout'?"),
    ({"model": {"class_path": "fsd_train.models.LMModule", "init_args": {"draftr": "x"}}}, "mean 'drafter'?"),
    ({"model": {"class_path": "fsd_train.models.MtpModule", "init_args": {"unrol_steps": 2}}}, "mean 'unroll_steps'?"),
    ({"model": {"learning_rate": 3}}, "there is no model.learning_rate: here it is model.optimizer.init_args.lr."),
    ({"tp_size": 2}, "there is no tp_size: here it is trainer.strategy: fsdp, which shards the target; there is no"),
]


@pytest.mark.parametrize(("recipe", "said"), MISTAKES)
def test_a_misspelt_key_is_named_with_its_section(recipe: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(FsdError) as found:
        check(["--config", written(tmp_path, recipe)])
    assert said in str(found.value)
    check(["--config", written(tmp_path, SHORT), "--trainer.max_steps", "3", "--model.class_path=x", "--data.seed=1"])


def test_the_keys_of_ones_own_module_are_not_known(tmp_path: Path) -> None:
    """Wherever its class is named: in this recipe, in another one, or on the command line."""
    own = {"class_path": "mine.EagleModule", "init_args": {"anything": 1}}
    named = written(tmp_path, {"model": own})
    unnamed = written(tmp_path, {"model": {"anything": 2}}, "other.yaml")
    check(["--config", named, "--config", unnamed, "--model.anything=3", "--model.init_args.anything", "4"])
    check(["--model", "mine.Module", "--config", unnamed])
    check(["--config", unnamed, "--model.class_path=mine.Module", "--model.anything", "3"])
    check(["--config", unnamed, "--model", "fsd_train.models.LMModule", "--model.drafter", "x"][2:])
    for words, said in (
        (["--config", unnamed], "there is no model.anything"),
        (["--model.anything=3"], "there is no --model.anything"),
        (["--model.head.layuot", "fsd"], "there is no --model.head.layuot. Did you mean 'layout'?"),
        (["--trainer.max_steps", "2"], "give a recipe: --config FILE"),
        (["--modl.unroll_steps", "2"], "there is no --modl. Did you mean 'model'?"),
        (["--model.drafter=x"], "there is no --model.drafter of this module: it belongs to LMModule"),
    ):
        with pytest.raises(FsdError, match=re.escape(said)):
            check(words)
    check(["--config", "smollm2-135m-dspark", "--model.head.rank", "3"])  # not an option of EAGLE heads


def test_a_target_in_tensor_parallel_is_refused() -> None:
    """Its ranks would sum the activations of different batches."""
    with pytest.raises(FsdError, match="training has no tensor parallelism. trainer.strategy fsdp shards the target"):
        EagleModule("smollm2-135m", target_kwargs={"tp_plan": "auto"})


def read(*words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what Lightning's parser makes of a command line: the trainer's options, and those of callbacks."""
    trainer = configured(words, _RecipeReader).config["trainer"].as_dict()
    return trainer, {each["class_path"].rpartition(".")[2]: each.get("init_args") for each in trainer["callbacks"]}


def test_a_short_recipe_stands_for_a_long_one(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, SHORT))
    trainer, callbacks = read("--config", written(tmp_path, SHORT))
    assert recipe.trainer == trainer and recipe.model["lr_scheduler"]["init_args"]["warmup_ratio"] == 0.25
    assert trainer["max_epochs"] == 3 and trainer["max_steps"] == -1 and trainer["val_check_interval"] == 40
    assert trainer["limit_val_batches"] == 4 and trainer["default_root_dir"] == "runs/mine"
    assert list(callbacks) == ["ModelCheckpoint", "ExportHead", "DecodedTau", "LossCurve", "TokenRate"]
    assert callbacks["ExportHead"]["directory"] == "runs/mine/head"
    assert callbacks["DecodedTau"]["every_n_train_steps"] == 80
    own = {"class_path": "fsd_train.callbacks.ExportHead", "init_args": {"directory": "elsewhere"}}
    for given in (own, [own]):
        trainer, callbacks = read("--config", written(tmp_path, {**SHORT, "trainer": {"callbacks": given}}))
        assert len(trainer["callbacks"]) == 5 and callbacks["ExportHead"]["directory"] == "elsewhere"


def test_recipes_are_read_one_over_the_other_and_options_last(tmp_path: Path) -> None:
    """The defaults of one short recipe do not replace what another says; a schedule keeps its other options."""
    schedule = {"class_path": "fsd_train.models.WarmupCosine", "init_args": {"final_lr": 0.5}}
    first = {**SHORT, "trainer": {"precision": "32-true"}, "model": {"target": "x", "lr_scheduler": schedule}}
    second = {"output_dir": "runs/second", "warmup_ratio": 0.5, "trainer": {"max_steps": 9}}
    words = ["--config", written(tmp_path, first), "--config", written(tmp_path, second, "second.yaml")]
    config = configured([*words, "--trainer.accumulate_grad_batches=3", "--save_steps", "10"], _RecipeReader).config
    trainer, made = config["trainer"], config["model.init_args.lr_scheduler.init_args"]
    assert (trainer["precision"], trainer["max_steps"], trainer["max_epochs"]) == ("32-true", 9, 3)
    assert trainer["val_check_interval"] == 30 and trainer["default_root_dir"] == "runs/second"
    assert (made["warmup_ratio"], made["final_lr"]) == (0.5, 0.5) and config["ckpt_path"] == "auto"
    assert read("--num_epochs=4", *words[:2])[0]["max_epochs"] == 4, "an option, wherever it stands"
    assert read("--output_dir=3", *words[:2])[0]["default_root_dir"] == "3"


def test_each_callback_has_its_own_arguments_alone(tmp_path: Path) -> None:
    """Where a recipe replaces one, the others move up in the list; where a later one replaces the list, all do."""
    tau = {"monitor": "val_tau", "mode": "max", "dirpath": "mine"}
    own = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": tau}
    first = written(tmp_path, {**SHORT, "trainer": {"callbacks": own}})
    defaults, callbacks = read("--config", written(tmp_path, SHORT, "defaults.yaml"))[1], read("--config", first)[1]
    assert list(callbacks) == ["ExportHead", "DecodedTau", "LossCurve", "TokenRate", "ModelCheckpoint"]
    assert {name: defaults[name] for name in list(callbacks)[:-1]} == dict(list(callbacks.items())[:-1])
    assert callbacks["ModelCheckpoint"]["filename"] is None, "it is not the defaults' one"
    curve = {"class_path": "fsd_train.callbacks.LossCurve", "init_args": {"path": "mine.png"}}
    long = written(tmp_path, {"trainer": {"callbacks": [own, curve]}, "model": {"target": "x"}}, "long.yaml")
    for begin in (["--config", first], ["--config", long]):
        later = written(tmp_path, {"trainer": {"callbacks": [curve]}}, "later.yaml")
        assert read(*begin, "--config", later, "--data.train_files", "[x]")[1]["LossCurve"]["every_n_train_steps"] == 10


def test_output_dir_moves_a_run_that_is_written_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = json.loads(json.dumps(read_recipe(written(tmp_path, SHORT)).trainer))
    own = {"class_path": "fsd_train.callbacks.LossCurve", "init_args": {"path": "elsewhere/curves.png"}}
    trainer = {**long, "callbacks": [*long["callbacks"][:3], own]}
    path = written(tmp_path, {"trainer": trainer, "model": SHORT["model"], "data": SHORT["data"]})
    with caplog.at_level(logging.WARNING):
        trainer, callbacks = read("--config", path, "--output_dir", "new")
    assert "these stay where the recipe has them: path elsewhere/curves.png" in caplog.text
    assert trainer["default_root_dir"] == trainer["logger"]["init_args"]["save_dir"] == "new"
    places = [callbacks[kind][key] for kind, key in (
        ("ModelCheckpoint", "dirpath"), ("ExportHead", "directory"), ("DecodedTau", "best"), ("LossCurve", "path"),
    )]  # fmt: skip
    assert places == ["new/checkpoints", "new/head", "new/best", "elsewhere/curves.png"]
    assert trainer["val_check_interval"] == 40, "what it says itself stays"


MISSAID: list[tuple[dict[str, Any], str]] = [
    ({"output_dir": 3}, "output_dir is a path, got 3"),
    ({"num_epochs": 0}, "num_epochs is a whole number of at least 1, got 0"),
    ({"save_steps": 2}, "save_steps needs output_dir"),
    ({"output_dir": "x", "save_steps": "ten"}, "save_steps is a whole number of at least 1, got 'ten'"),
    ({"warmup_ratio": "much"}, "warmup_ratio is a number from 0 to 1, got 'much'"),
    ({"warmup_ratio": 0.1, "model": [1]}, "the section model holds no options, but [1]"),
    ({"warmup_ratio": 0.1, "model": {"lr_scheduler": 3}}, "model.lr_scheduler is a class_path"),
    ({"output_dir": "x", "trainer": 3}, "the section trainer holds no options, but 3"),
    ({"output_dir": "x", "trainer": {"callbacks": 3}}, "trainer.callbacks is a list"),
    ({"output_dir": "x", "trainer": {"accumulate_grad_batches": "x"}}, "accumulate_grad_batches is a whole number"),
    ({"import": {"a": 1}}, "import is a list of modules, got {'a': 1}"),
]


WORDS = [
    (["--output_dir"], "--output_dir needs a value"), (["--output_dir", "--strict"], "--output_dir needs a value"),
    (["--num_epochs", "["], "num_epochs is a whole number of at least 1, got '['"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), [*MISSAID, *WORDS])
def test_values_of_the_wrong_type_are_named(given: Any, said: str, tmp_path: Path) -> None:
    words = given if isinstance(given, list) else ["--config", written(tmp_path, given)]
    with pytest.raises(FsdError, match=re.escape(said)):
        written_out(words)


def test_options_take_precedence(tmp_path: Path) -> None:
    words, modules = written_out(["--config", written(tmp_path, SHORT), "--import=mine", "--import+=too", "--strict"])
    assert words[-1] == "--data.strict=true" and modules == ["mine", "too"]


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
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    for module, name in (("by_option", "own-option"), ("by_recipe", "own-recipe"), ("by_package", "own-package")):
        (here / f"{module}.py").write_text(OWN_LOSS.format(name=name))
    installed = here / "site" / "mine-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[fsd_toolkit.plugins]\nmine = by_package\n")
    monkeypatch.syspath_prepend(str(here / "site"))
    recipe = {**SHORT, "import": ["by_recipe"], "trainer": {"accelerator": "cpu", "max_steps": 1}}
    path = written(here, recipe)
    assert read_recipe(path).model["target"] == "smollm2-135m"
    for loss in ("own-option", "own-recipe", "own-package"):
        made = configured(["--config", path, "--import", "by_option", "--model.loss", loss])
        assert type(made.model.loss).__name__ == "Own"
    with pytest.raises(FsdError, match="--import nothing_here: ModuleNotFoundError"):
        configured(["--config", path, "--import", "nothing_here"])
