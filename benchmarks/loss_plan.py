"""What `benchmarks.compare_losses` is to do, read from YAML and checked before anything is trained."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer

from fsd_infer.drafters import TreeShape
from fsd_infer.errors import FsdError
from fsd_infer.rules import parse_rule
from fsd_train.data import AnswersDataModule
from fsd_train.eagle_module import EagleModule
from fsd_train.losses import build_loss
from fsd_train.options import TrainingOptions

SECTIONS = ("steps", "seeds", "baselines", "model", "data", "trainer", "arms", "evaluation")
PARTS = ("all", "tune", "report")
BIG = 2**24  # bytes; larger files count by their size (shards of features have their checksums beside them)
_NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True)
class Evaluation:
    """How heads are judged: decoding of held-out prompts.

    Attributes:
        rules: acceptance rules, "exact" and fuzzy ones by rising threshold.
        prompts: how many, taken at equal distances among those that fit.
        part: "all" held-out prompts, or one half of them, chosen by hash: settle options on "tune" and publish what
            "report" says.
        max_prompt_tokens: longer prompts are left out.
        max_new_tokens: of each answer.
        batch_size: prompts decoded at once.
        temperature: 0 is greedy.
        tree: depth, width and nodes of the draft tree; by default those of the device.
        seed: of draws and of the bootstrap.
    """

    rules: list[str]
    prompts: int = 40
    part: str = "report"
    max_prompt_tokens: int = 384
    max_new_tokens: int = 64
    batch_size: int = 20
    temperature: float = 0.0
    tree: dict[str, int] | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises FsdError on an option that cannot be."""
        counts = ("prompts", "max_prompt_tokens", "max_new_tokens", "batch_size", "seed")
        if not all(type(getattr(self, name)) is int for name in counts):
            raise FsdError(f"evaluation: {', '.join(counts)} are whole numbers.")
        if not self.rules or self.part not in PARTS:
            raise FsdError(f"evaluation: give rules, and part as one of {', '.join(PARTS)}.")
        if min(self.prompts, self.max_prompt_tokens, self.batch_size) < 1 or self.max_new_tokens < 2:
            raise FsdError("evaluation: prompts, max_prompt_tokens and batch_size start at 1, max_new_tokens at 2.")
        if self.temperature < 0:
            raise FsdError(f"evaluation: temperature must not be negative, got {self.temperature}.")
        for rule in self.rules:
            parse_rule(rule)
        if self.tree is not None:
            _known("evaluation: tree", self.tree, [each.name for each in fields(TreeShape)])
            TreeShape(**self.tree)


@dataclass(frozen=True)
class Arm:
    """One way to train: its own options of EagleModule over those of all arms, and its number of steps."""

    name: str
    model: dict[str, Any]
    steps: int


@dataclass(frozen=True)
class Run:
    """One arm with one seed, and the directory that holds everything of it."""

    arm: Arm
    seed: int
    directory: Path
    digest: str


@dataclass(frozen=True)
class Plan:
    """The whole comparison. ``model``, ``data`` and ``trainer`` are options of `fsd-train fit` for all arms."""

    arms: list[Arm]
    seeds: list[int]
    baselines: list[str]
    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]
    evaluation: Evaluation

    def to_dict(self) -> dict[str, Any]:
        """For records."""
        return asdict(self)

    def data_digest(self) -> str:
        """Changes with the content of the answers and of the cached features."""
        paths = [*self.data["train_files"], *(self.data.get("validation_files") or [])]
        paths += [self.data["features"]] if self.data.get("features") else []
        return _sha256([content_digest(path) for path in paths])

    def runs(self, output: Path) -> list[Run]:
        """Every arm with the first seed, then every arm with the second, so that what is there can be compared early.

        A run's directory carries a hash of all that its head depends on, contents of files included and their places
        left out, so that nothing stale is ever taken for a result.
        """
        data = {key: value for key, value in self.data.items() if not key.endswith("_files") and key != "features"}
        common = {"data": data, "content": self.data_digest(), "cached": bool(self.data.get("features"))}
        found = []
        for seed in self.seeds:
            for arm in self.arms:
                model = dict(arm.model)
                if model.get("initial_head"):
                    model["initial_head"] = content_digest(model["initial_head"])
                facts = {**common, "model": model, "trainer": self.trainer, "steps": arm.steps, "seed": seed}
                digest = _sha256(facts)
                found.append(Run(arm, seed, output / f"{arm.name}-seed{seed}-{digest[:8]}", digest))
        return found


def read_plan(
    path: str | Path,
    *,
    arms: Sequence[str] = (),
    seeds: Sequence[int] = (),
    steps: int | None = None,
    changes: Sequence[str] = (),
) -> Plan:
    """Read and check a configuration.

    Args:
        path: YAML, see benchmarks/compare_losses.yaml.
        arms: names of the arms to run; by default all that are not marked ``extra``.
        seeds: instead of the file's.
        steps: instead of the file's, for arms without a number of their own.
        changes: ``KEY.KEY=VALUE`` (YAML), over the file's values.

    Raises:
        FsdError: a malformed file, an unknown option, arm, loss or rule, or a file that is not there.
    """
    values = _read(Path(path))
    for change in changes:
        _change(values, change)
    _known(str(path), values, SECTIONS)
    missing = [key for key in ("model", "data", "arms", "evaluation") if not values.get(key)]
    if missing:
        raise FsdError(f"{path}: the section {missing[0]} is missing.")
    trainer, model, data = values.get("trainer") or {}, values["model"], values["data"]
    _known("model", model, _module_options())
    _known("data", data, inspect.signature(AnswersDataModule).parameters)
    _known("trainer", trainer, inspect.signature(Trainer).parameters)
    steps = values.get("steps", 0) if steps is None else steps
    seeds = list(seeds) or values.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(type(number) is int for number in [steps, *seeds]):
        raise FsdError(f"{path}: steps must be a whole number and seeds a list of them.")
    made = _arms(values["arms"], model, steps, arms)
    _known("evaluation", values["evaluation"], [each.name for each in fields(Evaluation)])
    evaluation = Evaluation(**{"rules": [], **values["evaluation"]})
    evaluation.check()
    files = [data.get("train_files"), data.get("validation_files") or []]
    if not all(isinstance(names, list) for names in files):
        raise FsdError("data: train_files and validation_files are lists of files.")
    for file in [*files[0], *files[1], data.get("features")]:
        if file is not None and not Path(file).exists():
            raise FsdError(
                f"{file} is not there: the head of {path} says how it is made, or give --set data.… another."
            )
    baselines = [str(name) for name in values.get("baselines") or []]
    return Plan(
        arms=made,
        seeds=seeds,
        baselines=[name for name in baselines if name in {arm.name for arm in made}],
        model=dict(model),
        data=dict(data),
        trainer=dict(trainer),
        evaluation=evaluation,
    )


def _module_options() -> list[str]:
    """What a recipe's `model` section may hold: EagleModule's own options and those it passes on."""
    own = [name for name in inspect.signature(EagleModule).parameters if name != "training"]
    return [*own, *(each.name for each in fields(TrainingOptions) if each.name not in own)]


def _arms(entries: Any, model: Mapping[str, Any], steps: int, chosen: Sequence[str]) -> list[Arm]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) and entry.get("name") for entry in entries):
        raise FsdError("arms: give a list of mappings with a name each.")
    known = {str(entry["name"]): entry for entry in entries}
    if len(known) < len(entries):
        raise FsdError("arms: every name may occur once.")
    for name in chosen:
        if name not in known:
            raise FsdError(f"no arm is called {name!r}; there are {', '.join(known)}.")
    names = list(chosen) or [name for name, entry in known.items() if not entry.get("extra")]
    options = _module_options()
    made = []
    for name in names:
        own = {key: value for key, value in known[name].items() if key not in ("name", "extra", "steps")}
        whole = {**model, **own, "head": {**(model.get("head") or {}), **(own.get("head") or {})}}
        if "loss" in own and "loss_args" not in own:  # arguments belong to the loss they were written for
            whole.pop("loss_args", None)
        _known(f"arm {name}", whole, options)
        if not _NAME.fullmatch(name):
            raise FsdError(f"arm {name!r}: a name is made of letters, digits and . _ + -.")
        for key in ("seed", "time_limit"):
            if key in whole:
                raise FsdError(f"arm {name}: leave {key} out; runs differ by the list of seeds and end by steps.")
        build_loss(whole.get("loss", "eagle"), whole.get("loss_args"))
        if whole.get("initial_head") and not Path(whole["initial_head"]).is_dir():
            raise FsdError(f"arm {name}: initial_head {whole['initial_head']} is no directory.")
        count = known[name].get("steps", steps)
        if type(count) is not int or count < 1:
            raise FsdError(f"arm {name}: give a number of steps.")
        made.append(Arm(name, whole, count))
    return made


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FsdError(f"{path} cannot be read ({error.strerror}).") from error
    except yaml.YAMLError as error:
        raise FsdError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(values, dict):
        raise FsdError(f"{path}: expected a mapping with the sections {', '.join(SECTIONS)}.")
    return values


def _change(values: dict[str, Any], change: str) -> None:
    """Set one value by its dotted name."""
    place, equals, text = change.partition("=")
    keys = place.split(".")
    if not equals or not all(keys):
        raise FsdError(f"--set {change!r}: write KEY.KEY=VALUE.")
    inner = values
    for key in keys[:-1]:
        if not isinstance(inner.setdefault(key, {}), dict):
            raise FsdError(f"--set {change!r}: {key} is no mapping.")
        inner = inner[key]
    try:
        inner[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FsdError(f"--set {change!r}: the value is not YAML ({str(error).splitlines()[0]}).") from error


def _known(where: str, values: Any, names: Any) -> None:
    if not isinstance(values, Mapping):
        raise FsdError(f"{where}: expected a mapping, got {values!r}.")
    unknown = sorted(str(key) for key in values if key not in names)
    if unknown:
        raise FsdError(f"{where}: unknown option {', '.join(unknown)}; known: {', '.join(names)}.")


def content_digest(path: str | Path) -> str:
    """Hexadecimal digest of a file's content, or of all files of a directory but unfinished ones (.partial)."""
    path = Path(path)
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    facts = []
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.suffix != ".partial":
            size = file.stat().st_size
            facts.append((file.relative_to(path).as_posix(), size, content_digest(file) if size <= BIG else None))
    return _sha256(facts)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
