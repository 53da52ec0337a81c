"""Short recipes: ``output_dir`` and its like stand for the trainer's options, logger and callbacks that runs share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fsd_core.errors import FsdError
from fsd_train.commands.recipe_keys import SHORT, read_yaml
from fsd_train.repository import find_recipe

log = logging.getLogger(__name__)

TRAINER = {  # of runs with output_dir
    "precision": "bf16-mixed", "max_epochs": -1, "gradient_clip_val": 1.0, "log_every_n_steps": 10,
    "check_val_every_n_epoch": None, "limit_val_batches": 16, "num_sanity_val_steps": 0,
}  # fmt: skip
SAVE_STEPS = 500
WRITTEN_OUT = SHORT.keys() - {"import"}
TEXT = {"output_dir", "resume"}  # as options they are taken as they are written
DECODED = 4  # DecodedTau runs at every fourth checkpoint
SCHEDULE = "fsd_train.models.WarmupCosine"
ACCUMULATE = "accumulate_grad_batches"
PLACES = {"default_root_dir", "save_dir", "dirpath", "directory", "best", "path"}  # options that name what a run writes


def expanded(recipes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what recipes that are read one after the other stand for: one of defaults, then each without short keys.

    What recipes say themselves of trainer and callbacks takes precedence over the defaults; the callbacks of a recipe
    after the one with ``output_dir`` replace them, as lists of later recipes do: only the last list is passed on. A
    later ``output_dir`` moves what an earlier recipe writes to the directory of its run; other directories stay, and a
    warning names them.

    Raises:
        FsdError: a value of the wrong type.
    """
    written = [_without_short_keys(recipe) for recipe in recipes]
    _move(recipes, written)
    short: dict[str, Any] = {key: value for recipe in recipes for key, value in recipe.items() if key in WRITTEN_OUT}
    defaults: dict[str, Any] = {"trainer": {}}
    if "output_dir" in short:
        run, every = _text(short, "output_dir"), _whole(short, "save_steps", SAVE_STEPS)
        batches = [trainer[ACCUMULATE] for recipe in written if (trainer := recipe.get("trainer", {})).get(ACCUMULATE)]
        defaults["trainer"] = _run_options(run, every, _whole({ACCUMULATE: [1, *batches][-1]}, ACCUMULATE))
        first = next(index for index, recipe in enumerate(recipes) if "output_dir" in recipe)
        for trainer in [recipe.get("trainer", {}) for recipe in written[: first + 1]]:
            if "callbacks" in trainer:
                trainer["callbacks"] = _merge_callbacks(defaults["trainer"]["callbacks"], trainer["callbacks"])
    elif "save_steps" in short:
        raise FsdError("save_steps needs output_dir: give both, or a ModelCheckpoint in trainer.callbacks.")
    if "warmup_ratio" in short:
        defaults["model"] = {"lr_scheduler": {"class_path": SCHEDULE}}
    layers = [defaults, *written]
    # the parser would give each callback the arguments of what stands at its place in an earlier list
    for trainer in [layer["trainer"] for layer in layers if "callbacks" in layer.get("trainer", {})][:-1]:
        del trainer["callbacks"]
    return layers


def written_out(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line for Lightning's parser, and the modules to import first.

    Recipes are found by name, short ones become text, and --output_dir and its like follow the last recipe.

    Raises:
        FsdError: a value of the wrong type, or none.
    """
    words, short, modules = list[list[str]](), dict[str, Any](), list[str]()
    recipes: dict[int, dict[str, Any]] = {}  # by place in words
    remaining = iter(argv)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option == "--strict":
            words.append(["--data.strict=true"])
        elif option in ("-c", "--config"):
            named = value if equals else _option_value(option, remaining)
            recipes[len(words)] = read_yaml(path := find_recipe(named))
            words.append(["--config", str(path) if os.path.isfile(path) else named])
        elif option in ("--import", "--import+"):  # modules add up either way
            modules.append(value if equals else _option_value(option, remaining))
        elif option[:2] == "--" and option[2:] in SHORT:
            short[option[2:]] = _value(option[2:], value if equals else _option_value(option, remaining))
        else:
            words.append([word])
    for recipe in recipes.values():
        modules += _modules(recipe.get("import"))
    if short or len(recipes) > 1 or any(recipe.keys() & WRITTEN_OUT for recipe in recipes.values()):
        defaults, *layers, last, _ = expanded([*recipes.values(), short, _accumulated(argv)])
        for index, layer, recipe in zip(recipes, layers, recipes.values()):
            words[index] = _config(layer) if layer != recipe else words[index]
        index = max(recipes, default=-1) + 1
        words = [_config(defaults), *words[:index], _config(last), *words[index:]]
    return [word for part in words for word in part], modules


def _config(layer: Mapping[str, Any]) -> list[str]:
    """Return a recipe as an option of Lightning's parser, which also reads text."""
    filled = {key: value for key, value in layer.items() if value != {}}
    return ["--config", yaml.safe_dump(filled, allow_unicode=True, sort_keys=False)] if filled else []


def _option_value(option: str, rest: Iterator[str]) -> str:
    value = next(rest, "")
    if not value or value.startswith("--"):
        raise FsdError(f"{option} needs a value.")
    return value


def _value(key: str, text: str) -> Any:
    try:
        return text if key in TEXT else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _accumulated(argv: Sequence[str]) -> dict[str, Any]:
    """Return the last ``--trainer.accumulate_grad_batches`` as a recipe has it, {} if there is none."""
    recipe: dict[str, Any] = {}
    for word, following in zip(argv, [*argv[1:], ""]):
        option, equals, value = word.partition("=")
        if option == f"--trainer.{ACCUMULATE}":
            recipe = {"trainer": {ACCUMULATE: _value(ACCUMULATE, value if equals else following)}}
    return recipe


def _modules(named: Any) -> list[str]:
    """Return the modules of a recipe's ``import``."""
    modules = [named] if isinstance(named, str) else named or []
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise FsdError(f"import is a list of modules, got {named!r:.60}.")
    return modules


def _without_short_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe whose short keys are written out, except output_dir and save_steps."""
    result = {key: value for key, value in recipe.items() if key not in WRITTEN_OUT}
    if "trainer" in result or "num_epochs" in recipe:
        trainer = result["trainer"] = _section(recipe, "trainer")
        if "callbacks" in trainer:
            trainer["callbacks"] = _list(trainer["callbacks"])
    if "resume" in recipe:
        result["ckpt_path"] = _text(recipe, "resume")
    if "num_epochs" in recipe:
        result["trainer"] |= {"max_epochs": _whole(recipe, "num_epochs"), "max_steps": -1}
    if "warmup_ratio" in recipe:
        result["model"] = _with_warmup(_section(recipe, "model"), _share(recipe, "warmup_ratio"))
    return result


def _run_options(run: str, every: int, batches: int) -> dict[str, Any]:
    """Return the trainer's options for a run that writes to a directory."""
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": run, "name": "logs"}}
    run_options = {"val_check_interval": every * batches, "default_root_dir": run, "logger": logger}
    return {**TRAINER, **run_options, "callbacks": _callbacks(run, every)}


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


def _merge_callbacks(defaults: list[dict[str, Any]], given: list[Any]) -> list[Any]:
    """Return the callbacks of defaults whose class is not among ``given``, then these."""

    def kind(callback: Any) -> str:
        named = callback.get("class_path") if isinstance(callback, Mapping) else callback
        return str(named).rpartition(".")[2]

    return [*(default for default in defaults if kind(default) not in set(map(kind, given))), *given]


# directories of a run that moves ------------------------------------------------------------------------------------


def _move(recipes: Sequence[Mapping[str, Any]], written: list[dict[str, Any]]) -> None:
    """Move what recipes before a later output_dir write to the directory of their run; warn of other directories."""
    runs = set[str]()
    for index, recipe in enumerate(recipes):
        if "output_dir" in recipe:
            run, unmoved = _text(recipe, "output_dir"), list[str]()
            for earlier in written[:index]:
                if "trainer" in earlier:
                    earlier["trainer"] = _move_paths(earlier["trainer"], runs, run, unmoved)
            if unmoved:
                log.warning(
                    "output_dir is now %s, but these stay where the recipe has them: %s", run, ", ".join(unmoved)
                )
            runs.add(run)
        if isinstance(root := written[index].get("trainer", {}).get("default_root_dir"), str):
            runs.add(root)


def _move_paths(value: Any, runs: set[str], run: str, unmoved: list[str], key: str = "") -> Any:
    """Return options with the paths in any of ``runs`` in ``run`` instead; add other paths of PLACES to ``unmoved``."""
    if isinstance(value, Mapping):
        return {name: _move_paths(item, runs, run, unmoved, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_move_paths(item, runs, run, unmoved) for item in value]
    if key not in PLACES or not isinstance(value, str):
        return value
    for old in runs:
        if Path(value).is_relative_to(old):
            return str(Path(run) / Path(value).relative_to(old))
    if not Path(value).is_relative_to(run):
        unmoved.append(f"{key} {value}")
    return value


# values -------------------------------------------------------------------------------------------------------------


def _with_warmup(model: dict[str, Any], ratio: float) -> dict[str, Any]:
    options = dict(model.get("init_args") or {}) if "class_path" in model else model
    schedule = options.get("lr_scheduler") or {}
    schedule = {"class_path": schedule} if isinstance(schedule, str) else schedule
    if not isinstance(schedule, Mapping):
        raise FsdError(f"model.lr_scheduler is a class_path with init_args, got {schedule!r:.60}.")
    options["lr_scheduler"] = {**schedule, "init_args": {**(schedule.get("init_args") or {}), "warmup_ratio": ratio}}
    return {**model, "init_args": options} if "class_path" in model else options


def _section(recipe: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(section := recipe.get(name) or {}, Mapping):
        raise FsdError(f"the section {name} holds no options, but {section!r:.60}. See recipes/template.yaml.")
    return dict(section)


def _list(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, (Mapping, str)):
        return [callbacks]
    if not isinstance(callbacks, list | None):
        raise FsdError(f"trainer.callbacks is a list of callbacks, got {callbacks!r:.60}.")
    return callbacks or []


def _text(given: Mapping[str, Any], key: str) -> str:
    if not isinstance(given[key], str) or not given[key]:
        raise FsdError(f"{key} is a path, got {given[key]!r:.60}.")
    return str(given[key])


def _whole(given: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    value = given.get(key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FsdError(f"{key} is a whole number of at least 1, got {value!r:.60}.")
    return value


def _share(given: Mapping[str, Any], key: str) -> float:
    value = given[key]
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
        raise FsdError(f"{key} is a number from 0 to 1, got {value!r:.60}.")
    return float(value)
