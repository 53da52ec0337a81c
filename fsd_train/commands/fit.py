"""`fsd-train fit` and `fsd-train validate`: LightningCLI, with every mistake in a recipe or an option as one line."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from fsd_infer.cli.run import one_line
from fsd_infer.errors import DataError, FsdError
from fsd_train.callbacks.announce import Announce
from fsd_train.callbacks.progress import RunProgress
from fsd_train.callbacks.runs import AUTO, RunDirectory
from fsd_train.checkpoints import check_checkpoint
from fsd_train.data.module import AnswersDataModule
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.eagle import EagleModule
from fsd_train.models.scheduled import ScheduledModule
from fsd_train.repository import find
from fsd_train.strategies import check_ranks, named_strategy

# what Lightning says that a user can do nothing about, or need not: by the beginning of the message
_IDLE_WARNINGS = (
    "`isinstance(treespec, LeafSpec)`", "Checkpoint directory", "The 'train_dataloader' does not have many",
    "The 'val_dataloader' does not have many", "The number of training batches",
    "Experiment logs directory", "Total length of `list` across ranks is zero", "The dirpath has changed",
    "Precision bf16-mixed is not supported by the model summary", "There is a wandb run already",
)  # fmt: skip


class Parser(LightningArgumentParser):
    """Raises what is wrong, with the nearest right key, where jsonargparse prints its usage and exits."""

    keys: frozenset[str] = frozenset()  # of subcommands

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        own = {action.dest for action in self._actions}
        raise FsdError(readable(message, own | self.keys)) from ex


class TrainCLI(LightningCLI):
    """LightningCLI for this package's modules."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        found = LightningCLI.subcommands()
        return {name: found[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--overwrite", type=bool, default=False,
            help="fit: remove the checkpoints and heads that another run left in this one's directories",
        )  # fmt: skip

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        assert isinstance(parser, Parser)
        parser.keys = frozenset(action.dest for each in self._subcommand_parsers.values() for action in each._actions)
        try:
            self.config = parser.parse_args(args)  # Lightning's own warns of arguments beside sys.argv
        except FsdError:
            raise
        except Exception as error:
            raise DataError(f"the configuration cannot be read: {one_line(str(error))}") from error
        chosen = self.config[self.config["subcommand"]]
        for section in ("trainer", "model", "data"):
            if chosen.get(section) is None:
                raise FsdError(f"the section {section} is empty: see recipes/template.yaml.")
        for action in self._subcommand_parsers[self.config["subcommand"]]._actions:  # the parser lets null pass
            default = action.default
            if type(None) in get_args(getattr(action, "_typehint", None)):
                continue
            if default not in (None, argparse.SUPPRESS) and chosen.get(action.dest, default) is None:
                raise FsdError(f"{action.dest} is empty: leave it out for its default, {default}.")
        path = chosen.get("ckpt_path")
        if path != AUTO:
            check_checkpoint(path)  # before anything is loaded

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning lets a checkpoint's model section win over recipe and command line, without a word."""

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (TypeError, AttributeError, KeyError) as error:  # of constructors, which see the configuration alone
            raise DataError(f"the configuration cannot be used: {one_line(str(error))}") from (_cause(error) or error)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self._get(self.config_init, "trainer", default={})
        accelerator = options.get("accelerator", "auto")
        if accelerator in ("gpu", "cuda") and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
            raise DataError(
                f"trainer.accelerator is {accelerator}, and torch {torch.__version__} finds no such device: set it to "
                "auto or cpu, or install a build of torch for it."
            )
        if isinstance(options.get("strategy"), str):
            kwargs.setdefault("strategy", named_strategy(options["strategy"], accelerator))
        callbacks = options.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RunProgress())
        return super().instantiate_trainer(**{**kwargs, "callbacks": [Announce(), *callbacks]})

    def before_fit(self) -> None:
        check_ranks(self.model.options, self.trainer)
        options = self.config["fit"]
        directory = RunDirectory(self.trainer, options["overwrite"])
        directory.check_writable(self.trainer)
        path = directory.resolve(options.get("ckpt_path"))
        options["ckpt_path"] = self.config_init["fit"]["ckpt_path"] = path
        self.trainer.callbacks.append(directory)  # type: ignore[attr-defined]


def main(argv: Sequence[str]) -> int:
    """Runs `fit` or `validate` (the first argument); every option of Trainer, module and data is in --help."""
    # a model section without class_path is a head's; `class_path: fsd_train.models.lm.LMModule` trains a small LM
    chosen = class_paths(with_recipes(argv))
    with _command_line(argv):
        _train(argv, DistillationModule if chosen else EagleModule, bool(chosen))
    return 0


def _train(
    argv: Sequence[str], model_class: type[ScheduledModule], subclasses: bool, kind: type[TrainCLI] = TrainCLI
) -> TrainCLI:
    with quiet(), explained():
        return kind(
            model_class,
            AnswersDataModule,
            subclass_mode_model=subclasses,
            parser_class=Parser,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            # the data module's batch sampler splits the batches among replicas itself
            trainer_defaults={"use_distributed_sampler": False, "enable_model_summary": False},
            # a run that is continued must not be stopped by the record of its own settings
            save_config_kwargs={"overwrite": True},
            args=with_recipes(argv),
        )


class _Reader(TrainCLI):
    """Reads and checks, and goes no further."""

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def read_head_recipe(path: str | Path) -> dict[str, dict[str, Any]]:
    """Sections of a head's recipe with their defaults, checked as `fit` checks them. Raises FsdError as `fit` does."""
    argv = ["fit", "--config", str(path)]
    with _command_line(argv):
        line = _train(argv, EagleModule, False, _Reader)
    return {section: line.config["fit"][section].as_dict() for section in ("trainer", "model", "data")}


def with_recipes(argv: Sequence[str]) -> list[str]:
    """``argv`` with the names of recipes after --config replaced by their paths, as far as they are not files here."""
    words, after = [], False
    for word in argv:
        option, equals, value = word.partition("=")
        if after:
            word = str(find(word))
        elif option == "--config" and equals:
            word = f"{option}={find(value)}"
        after = word in ("-c", "--config")
        words.append(word)
    return words


def class_paths(argv: Sequence[str]) -> set[str]:
    """The model classes that options and configuration files name. Files that cannot be read are left to the parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=[])
    parser.add_argument("-c", "--config", action="append")
    parser.add_argument("--model", "--model.class_path", "--model.help", dest="names", action="append", nargs="?")
    found = parser.parse_known_args(argv)[0]
    names = set(found.names) - {None}
    for path in found.config:
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
            names.add(config["model"]["class_path"])
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
            continue
    return names


# errors -------------------------------------------------------------------------------------------------------------


def readable(message: str, known: Iterable[str]) -> str:
    """What the parser says, in one line: where the mistake is, what it is, and the nearest right key.

    Args:
        message: of jsonargparse.
        known: keys of the parser, with dots.
    """
    given = re.search(r"unrecognized arguments: -*([^\s=]+)", message)
    given = given or re.search(r"(?:does not accept option|Option) '([^']+)'(?: is not accepted)?", message)
    if given is not None and "Errors:" not in message:
        return _unknown(given[1], known)
    lacking = re.search(r"arguments are required: (.*)", message)
    if lacking is not None:
        return f"missing: {re.sub(r'(fit|validate)[.]', '', lacking[1])}. Give it in the recipe or as an option."
    place = re.match(r'Parser key "([^"]+)":\s*', message)
    if place is None:
        return one_line(message)
    rest = message[place.end() :]
    if "Errors:" in rest:
        errors = re.findall(r"^ *- (.*(?:\n {8,}.*)*)", rest.split("Errors:", 1)[1], flags=re.M)
        named = [
            error for error in errors if not re.match(r"Not a valid subclass|Expected a <class 'NoneType'>", error)
        ]
        best = [error for error in named if "Did you mean" in error or "class_path" in error]
        kinds, value = re.search(r"Subtypes: \[(.*)\]\n", rest), re.search(r"Given value: (.*)", rest, flags=re.S)
        if not best and kinds is not None and value is not None:
            return one_line(f"{place[1]}: {value[1]} is none of {_plain(kinds[1])}")[:600]
        rest = best[0] if best else named[0] if named else rest
    rest = _plain(rest.split("Given value type:")[0])
    return one_line(f"{place[1]}: {rest}" if place[1] != "config" else rest)


def _plain(types: str) -> str:
    return re.sub(r"<class '([^']+)'>", r"\1", types).replace("typing.", "")


def _unknown(key: str, known: Iterable[str]) -> str:
    parts, names = key.split("."), {name.removeprefix("fit.").removeprefix("validate.") for name in known}
    for depth, part in enumerate(parts):
        inside = [name.split(".")[depth:] for name in names if name.split(".")[:depth] == parts[:depth]]
        siblings = {rest[0] for rest in inside if rest}
        if part not in siblings:
            near = difflib.get_close_matches(part, sorted(siblings), n=1)
            hint = f" Did you mean {'.'.join([*parts[:depth], near[0]])!r}?" if near else ""
            return f"there is no option {'.'.join(parts[: depth + 1])!r}.{hint}"
    return f"there is no option {key!r}."


@contextmanager
def explained() -> Iterator[None]:
    """Turns what Lightning, jsonargparse and torch raise for a bad configuration into FsdError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            raise  # the command line says how to install it
        cause = _cause(error)
        if cause is not None:
            raise cause from None
        if isinstance(error, torch.OutOfMemoryError):
            raise FsdError("the device's memory is full: lower data.batch_tokens, or model.unroll_steps.") from error
        if isinstance(error, torch.distributed.DistError) or re.search("gloo|NCCL", str(error)):
            raise FsdError(
                "another process of this run has ended, or did not answer in time: see what it said, and go on with "
                f"--ckpt_path of the last checkpoint ({one_line(str(error))[:300]})."
            ) from error
        if _about_configuration(error):
            raise DataError(one_line(str(error)) or type(error).__name__) from error
        raise


def _cause(error: BaseException) -> FsdError | None:
    """The innermost error of ours: the parser wraps what a class raises."""
    found: FsdError | None = None
    current: BaseException | None = error
    while current is not None:
        found = current if isinstance(current, FsdError) else found
        current = current.__cause__
    return found


def _about_configuration(error: Exception) -> bool:
    """Was it raised by Lightning or the parser themselves, not by what runs inside them?"""
    if isinstance(error, ImportError) or "pip install" in str(error):
        return True
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_by = next((name for name in reversed(frames) if not name.startswith("contextlib")), "")
    return raised_by.split(".")[0] in ("lightning", "lightning_utilities", "jsonargparse", "yaml")


# what is printed ----------------------------------------------------------------------------------------------------


@contextmanager
def _command_line(argv: Sequence[str]) -> Iterator[None]:
    """Within it, sys.argv holds these arguments: Lightning starts other ranks with them."""
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def quiet() -> Iterator[None]:
    """Ours to say is printed as it is, warnings in one line, and none of Lightning's notices."""
    ours, theirs = logging.getLogger("fsd_train"), logging.getLogger("lightning.pytorch")
    level, their_level, handler = ours.level, theirs.level, logging.StreamHandler()
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    theirs.setLevel(logging.WARNING)
    fabric = logging.getLogger("lightning.fabric")
    fabric_level = fabric.level
    fabric.setLevel(logging.WARNING)

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        print(f"warning: {one_line(str(message))}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            for beginning in _IDLE_WARNINGS:
                warnings.filterwarnings("ignore", message=re.escape(beginning))
            warnings.showwarning = show
            yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
        theirs.setLevel(their_level)
        fabric.setLevel(fabric_level)
