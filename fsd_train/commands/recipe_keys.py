"""The keys of recipes, read from source files: a misspelt one is named at once, before the imports of training."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from fsd_core.console import one_line
from fsd_core.errors import FsdError
from fsd_core.registry import did_you_mean
from fsd_train.repository import find_recipe

HERE = Path(__file__).resolve().parent.parent
TOP = {"seed_everything", "trainer", "model", "data", "ckpt_path", "overwrite"}
# keys that fsd_train.commands.short_recipe writes out
SHORT = {
    "output_dir": "directory of the run: checkpoints, head, best head, logs and curves, with their callbacks",
    "save_steps": "with output_dir: steps between checkpoints (default: 500)",
    "resume": "auto: go on with the newest checkpoint; or a checkpoint",
    "num_epochs": "passes over the data, instead of trainer.max_steps",
    "warmup_ratio": "share of the run in which the learning rate rises",
    "import": "modules that register losses, or hold classes, of your own",
}
MODELS = {
    "EagleModule": "models/eagle.py", "LMModule": "models/lm.py", "BlockModule": "models/block.py",
    "MtpModule": "models/mtp.py",
}  # fmt: skip
ELSEWHERE = {  # what other trainers call these
    **dict.fromkeys(("lr", "learning_rate"), "model.optimizer.init_args.lr"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "data.batch_tokens"),
    **dict.fromkeys(("epochs", "num_train_epochs"), "num_epochs"),
    **dict.fromkeys(("model_name_or_path", "target_model_path", "verifier"), "model.target"),
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "max_grad_norm": "trainer.gradient_clip_val",
    "warmup_steps": "model.lr_scheduler.init_args.warmup_steps",
    "tp_size": "trainer.strategy: fsdp, which shards the target; there is no tensor parallelism (docs/training.md)",
    "bf16": "trainer.precision",
}
OF_PARSER = {"", "help", "config", "print_config", "class_path", "strict", "c"}  # options that are no keys
# sections, and whose keys they have by default
SECTIONS = {"": "", "trainer": "trainer", "data": "data", "model": "model.EagleModule", "model.head": "model.head"}


def _fields(path: Path, name: str) -> frozenset[str]:
    """Return the arguments of a class: those of its ``__init__``, or a dataclass's fields."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return frozenset(arg.arg for arg in [*node.args.args, *node.args.kwonlyargs] if arg.arg != "self")
    return frozenset(
        node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


@cache
def keys_of(section: str) -> frozenset[str] | None:
    """Return the keys of "", "trainer", "data", "model.head", or of "model.EagleModule" and its like; None: unknown."""
    if section == "":
        return frozenset({*TOP, *SHORT})
    if section == "trainer":
        spec = find_spec("lightning")
        (root,) = (spec.submodule_search_locations if spec is not None else None) or ("",)
        file = Path(root) / "pytorch" / "trainer" / "trainer.py"
        return _fields(file, "Trainer") if file.is_file() else None
    if section == "data":
        return _fields(HERE / "data" / "module.py", "AnswersDataModule")
    if section == "model.head":
        return _fields(HERE / "models" / "head_options.py", "HeadOptions")
    name = section.removeprefix("model.")
    shared = _fields(HERE / "models" / "distillation.py", "DistillationModule")
    return shared | _fields(HERE / MODELS[name], name) if name in MODELS else None


def check(words: Sequence[str]) -> None:
    """Raise FsdError for a key in a recipe, or in an option, that its section does not have.

    What else is wrong, the full reader says. Of a module of the user's own it alone knows the keys.
    """
    paths = list(_values(words, "-c", "--config"))
    recipes = {path: read_yaml(path) for path in map(find_recipe, paths)}
    classes = [model_class for recipe in recipes.values() if (model_class := _model_class(recipe))]
    kind = ["EagleModule", *classes, *_values(words, "--model", "--model.class_path")][-1]
    for section, key in _unknown(_options(words), kind):
        raise FsdError(_unknown_key_message(section, key, "--"))
    if not paths and not any(word.startswith(("--model", "--help", "-h", "--print_config")) for word in words):
        raise FsdError("give a recipe: --config FILE. `fsd-train new-recipe` writes one for your target.")
    for path, recipe in recipes.items():
        for section, key in _unknown(recipe, kind):
            raise FsdError(f"{path}: {_unknown_key_message(section, key)}")


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys that options name, as in a recipe: {"trainer": {"max_steps": {}}} for --trainer.max_steps 3."""
    result: dict[str, Any] = {}
    for word in words:
        keys = word.partition("=")[0].removesuffix("+").removeprefix("--").split(".")
        if word.startswith("--") and keys[-1] not in OF_PARSER:
            section = result
            for key in keys:
                section = section if key == "init_args" else section.setdefault(key, {})
    return result


def _values(words: Sequence[str], *options: str) -> Iterator[str]:
    """Yield the values of options on a command line."""
    for word, following in zip(words, [*words[1:], ""]):
        option, equals, value = word.partition("=")
        if option in options:
            yield value if equals else following


def _model_class(recipe: Mapping[str, Any]) -> str | None:
    """Return the class that a recipe names for its model."""
    model = recipe.get("model")
    return str(model["class_path"]) if isinstance(model, Mapping) and "class_path" in model else None


class _Reader(yaml.SafeLoader):
    """YAML whose mappings have each key once: PyYAML, and Lightning with it, drops all but the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ValueError(f"{key.value} is there twice, in lines {lines[key.value]} and {line}: keep one")
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return a recipe's keys and values; {} for a file that is missing.

    Raises FsdError for malformed YAML, one without sections, and for a key that is there twice.
    """
    if not os.path.isfile(path):  # said elsewhere
        return {}
    try:
        recipe = yaml.load(Path(path).read_text(encoding="utf-8"), _Reader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FsdError(f"{path} is not a recipe: {one_line(str(error))[:300]}.") from error
    if not isinstance(recipe, dict):
        raise FsdError(f"{path} is not a recipe: it has no sections (model, data). See recipes/template.yaml.")
    return recipe


def _unknown(recipe: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str]]:
    """Yield (section, key) of keys that are unknown; ``kind``: the model's class where the recipe names none."""
    model = recipe.get("model")
    model, kind = model if isinstance(model, Mapping) else {}, _model_class(recipe) or kind
    is_ours = kind in MODELS or kind.startswith("fsd_train.")  # ours are also found without their module
    kind = kind.rpartition(".")[2] if is_ours else ""
    options = model.get("init_args", {}) if "class_path" in model else model
    options = options if isinstance(options, Mapping) else {}
    parts = {"": recipe, "trainer": recipe.get("trainer"), "data": recipe.get("data"), f"model.{kind}": options}
    parts["model.head"] = options.get("head") if kind == "EagleModule" else None
    for section, values in parts.items():
        if not isinstance(values, Mapping) or "class_path" in values:
            continue
        if (known := keys_of(section)) is not None:
            named = section if section in SECTIONS else "model"
            yield from ((named, str(key)) for key in values if key not in known)


def _unknown_key_message(section: str, key: str, dashes: str = "") -> str:
    """Return an error about an unknown key, with the section to which it belongs or the key that was meant."""
    full_key = f"{dashes}{section}.{key}" if section else f"{dashes}{key}"
    for other, keys_section in SECTIONS.items():
        if key in (keys_of(keys_section) or ()) and other != section:
            location = f"in the section {other}" if other else "at the top level"
            return f"there is no {full_key}: {key} stands {location}."
    if key in ELSEWHERE:
        return f"there is no {full_key}: here it is {ELSEWHERE[key]}."
    known = similar = keys_of(SECTIONS[section]) or frozenset()
    if section == "model":
        keys_by_module = {name: keys_of(f"model.{name}") or frozenset() for name in MODELS}
        if modules := [name for name, keys in keys_by_module.items() if key in keys]:
            return f"there is no {full_key} of this module: it belongs to {' and '.join(modules)} (model.class_path)."
        similar = frozenset().union(*keys_by_module.values())
    listed = ", ".join(sorted(known))
    return f"there is no {full_key}.{did_you_mean(key, similar) or f' Known: {listed}.'}"


def class_of(path: str) -> Any:
    """Return the class that a class_path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def check_nulls(section: str, kind: type, values: Mapping[str, Any] | Any) -> None:
    """Raise FsdError for a null where the default is none, which jsonargparse takes.

    Args:
        section: section of the recipe, for the message.
        kind: the class that takes the values.
        values: by parameter, a mapping or a Namespace.
    """
    declared: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        declared |= inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}  # type: ignore[misc]
    for name, parameter in declared.items():
        default = parameter.default
        if values.get(name, "") is None and default not in (None, inspect.Parameter.empty):
            default_text = "" if callable(default) else f", which means {default}"
            raise FsdError(f"{section}.{name} is null: give a value, or leave it out{default_text}.")
