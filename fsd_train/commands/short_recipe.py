"""Short recipes: ``output_dir`` and its like stand for the trainer's options, logger and callbacks that runs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fsd_core.errors import FsdError
from fsd_train.commands.recipe_keys import SHORT, read_yaml
from fsd_train.repository import find

TRAINER = {  # of runs with output_dir
    "precision": "bf16-mixed", "max_epochs": -1, "gradient_clip_val": 1.0, "log_every_n_steps": 10,
    "check_val_every_n_epoch": None, "limit_val_batches": 16, "num_sanity_val_steps": 0,
}  # fmt: skip
SAVE_STEPS = 500
WRITTEN_OUT = SHORT.keys() - {"import"}
DECODED = 4  # DecodedTau runs at every fourth checkpoint


def expanded(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe that a short one stands for. What it says itself of trainer and callbacks takes precedence.

    Raises:
        FsdError: a value of the wrong type.
    """
    made = {key: value for key, value in recipe.items() if key not in SHORT or key == "import"}
    given = {key: recipe[key] for key in SHORT if key in recipe}
    trainer = made["trainer"] = dict(made.get("trainer") or {})
    if "output_dir" in given:
        _add_run(trainer, _text(given, "output_dir"), _whole(given, "save_steps", SAVE_STEPS))
    elif "save_steps" in given:
        raise FsdError("save_steps needs output_dir: give both, or a ModelCheckpoint in trainer.callbacks.")
    if "resume" in given:
        made["ckpt_path"] = _text(given, "resume")
    if "num_epochs" in given:
        trainer |= {"max_epochs": _whole(given, "num_epochs"), "max_steps": -1}
    if "warmup_ratio" in given:
        made["model"] = _with_warmup(dict(made.get("model") or {}), given["warmup_ratio"])
    return made


def written_out(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line for Lightning's parser, and the modules to import first.

    Recipes are found by name, short ones become text, and --output_dir and its like change the last recipe.
    """
    words, given, modules = list[str](), dict[str, Any](), list[str]()
    recipes: dict[int, Path] = {}  # place of the word -> recipe
    rest = iter(argv)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--strict":
            words.append("--data.strict=true")
        elif option in ("-c", "--config"):
            recipes[len(words) + 1] = find(value if equals else next(rest, ""))
            words += ["--config", str(recipes[len(words) + 1])]
        elif option[:2] == "--" and option[2:] in SHORT:
            value = value if equals else next(rest, "")
            if option == "--import":
                modules.append(value)
            else:
                given[option[2:]] = yaml.safe_load(value)
        else:
            words.append(word)
    last = max(recipes, default=0)
    for place, path in recipes.items():
        recipe = {**read_yaml(path), **(given if place == last else {})}
        modules += named if isinstance(named := recipe.get("import") or [], list) else [str(named)]
        if recipe.keys() & WRITTEN_OUT:
            words[place] = yaml.safe_dump(expanded(recipe), allow_unicode=True, sort_keys=False)
    if given and not recipes:
        words = ["--config", yaml.safe_dump(expanded(given)), *words]
    return words, modules


def _add_run(trainer: dict[str, Any], run: str, every: int) -> None:
    """Add what writes to the directory of the run."""
    own, batches = trainer.get("callbacks") or [], int(trainer.get("accumulate_grad_batches") or 1)
    named = {str(each.get("class_path", "")).rpartition(".")[2] for each in own if isinstance(each, Mapping)}
    callbacks = [each for each in _callbacks(run, every) if each["class_path"].rpartition(".")[2] not in named]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": run, "name": "logs"}}
    defaults = {**TRAINER, "val_check_interval": every * batches, "default_root_dir": run, "logger": logger}
    trainer |= {**defaults, **trainer, "callbacks": [*callbacks, *own]}


def _callbacks(run: str, every: int) -> list[dict[str, Any]]:
    checkpoints = {
        "dirpath": f"{run}/checkpoints", "filename": "step-{step}", "auto_insert_metric_name": False,
        "every_n_train_steps": every, "save_last": True, "enable_version_counter": False,
    }  # fmt: skip
    decoded = {
        "every_n_train_steps": DECODED * every, "prompts": 8, "max_new_tokens": 64, "best": f"{run}/best",
    }  # fmt: skip
    head = {"directory": f"{run}/head", "every_n_train_steps": every}
    return [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoints},
        {"class_path": "fsd_train.callbacks.ExportHead", "init_args": head},
        {"class_path": "fsd_train.callbacks.DecodedTau", "init_args": decoded},
        {"class_path": "fsd_train.callbacks.LossCurve", "init_args": {"path": f"{run}/curves.png"}},
        {"class_path": "fsd_train.callbacks.TokenRate"},
    ]


def _with_warmup(model: dict[str, Any], ratio: Any) -> dict[str, Any]:
    options = dict(model.get("init_args") or {}) if "class_path" in model else model
    schedule = options.get("lr_scheduler") or {"class_path": "fsd_train.models.WarmupCosine"}
    options["lr_scheduler"] = {**schedule, "init_args": {**(schedule.get("init_args") or {}), "warmup_ratio": ratio}}
    return {**model, "init_args": options} if "class_path" in model else options


def _text(given: Mapping[str, Any], key: str) -> str:
    if not isinstance(given[key], str) or not given[key]:
        raise FsdError(f"{key} is a path, got {given[key]!r:.60}.")
    return str(given[key])


def _whole(given: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    value = given.get(key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FsdError(f"{key} is a whole number of at least 1, got {value!r:.60}.")
    return value
