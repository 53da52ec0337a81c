"""`fsd-train fit` and `fsd-train validate`: LightningCLI, with every mistake in a recipe or an option as one line."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fsd_infer.cli.run import one_line
from fsd_infer.errors import DataError, FsdError
from fsd_train.callbacks.announce import Announce
from fsd_train.callbacks.progress import RunProgress
from fsd_train.callbacks.runs import AUTO, RunDirectory
from fsd_train.checkpoints import check_checkpoint
from fsd_train.data.module import AnswersDataModule
from fsd_train.models import DistillationModule, EagleModule
from fsd_train.repository import find
from fsd_train.strategies import check_ranks, named_strategy

MOST_SAID = 800  # characters of a library's message
HEAD = ("--model", "fsd_train.models.EagleModule")  # what a model section without class_path means
# what Lightning says that a user can do nothing about, or need not: by the beginning of the message
_IDLE_WARNINGS = (
    "`isinstance(treespec, LeafSpec)`", "Checkpoint directory", "The 'train_dataloader' does not have many",
    "The 'val_dataloader' does not have many", "The number of training batches", "LightningCLI's args parameter",
    "Experiment logs directory", "Total length of `list` across ranks is zero", "The dirpath has changed",
    "Precision bf16-mixed is not supported by the model summary", "There is a wandb run already",
)  # fmt: skip


class Parser(LightningArgumentParser):
    """Raises what is wrong, where jsonargparse prints its usage and exits."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise FsdError(one_line(message)[:MOST_SAID]) from ex


class TrainCLI(LightningCLI):
    """LightningCLI for this package's modules: what a recipe says, read, checked and made, but not run."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None,
            help="checkpoint to go on from, or to validate; auto: the newest in the run's directories",
        )  # fmt: skip
        parser.add_argument(
            "--overwrite", type=bool, default=False,
            help="fit: remove the checkpoints and heads that another run left in this one's directories",
        )  # fmt: skip

    def before_instantiate_classes(self) -> None:
        sections = {name: self.config.get(name) for name in ("trainer", "model", "data")}
        sections["model.head"] = self.config.get("model.init_args.head", Namespace())
        for name, section in sections.items():
            if not isinstance(section, Namespace):
                raise FsdError(f"the section {name} holds no options: see recipes/template.yaml.")
        if self.config.get("ckpt_path") != AUTO:
            check_checkpoint(self.config.get("ckpt_path"))  # before anything is loaded

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.config_init["trainer"]
        if isinstance(options.get("strategy"), str):
            kwargs.setdefault("strategy", named_strategy(options["strategy"]))
        callbacks = options.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RunProgress())
        return super().instantiate_trainer(**{**kwargs, "callbacks": [Announce(), *callbacks]})

    def prepare_run(self) -> str | None:
        """Check the run's directories; returns the checkpoint to go on from, if any."""
        check_ranks(self.trainer)
        directory = RunDirectory(self.trainer, self.config["overwrite"])
        directory.check_writable(self.trainer)
        path = directory.resolve(self.config.get("ckpt_path"))
        self.trainer.callbacks.append(directory)  # type: ignore[attr-defined]
        return path


class _Reader(TrainCLI):
    """Reads and checks, and goes no further."""

    def instantiate_classes(self) -> None:
        pass


def main(argv: Sequence[str]) -> int:
    """Runs `fit` or `validate` (the first argument); every option of Trainer, module and data is in --help."""
    with _command_line(argv), quiet():
        cli = configured(argv[1:])
        with run_errors():
            if argv[0] == "fit":
                path = cli.prepare_run()
                cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=path)
            else:
                path = cli.config.get("ckpt_path")
                cli.trainer.validate(cli.model, datamodule=cli.datamodule, ckpt_path=path)
    return 0


def configured(argv: Sequence[str], kind: type[TrainCLI] = TrainCLI) -> TrainCLI:
    """Trainer, module and data by a command line's options. Raises FsdError for every mistake in them."""
    with config_errors():
        return kind(
            DistillationModule,
            AnswersDataModule,
            subclass_mode_model=True,
            parser_class=Parser,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            # the data module's batch sampler splits the batches among replicas itself
            trainer_defaults={"use_distributed_sampler": False, "enable_model_summary": False},
            # a run that is continued must not be stopped by the record of its own settings
            save_config_kwargs={"overwrite": True},
            args=[*HEAD, *with_recipes(argv)],
            run=False,
        )


@dataclass(frozen=True)
class Recipe:
    """The sections of a recipe with their defaults; ``model`` holds the options of its class."""

    path: str
    trainer: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]


def read_recipe(path: str | Path) -> Recipe:
    """A recipe, checked as `fit` checks it. Raises FsdError, which names the file, as `fit` does."""
    try:
        config = _read(path).config
    except FsdError as error:
        raise FsdError(f"{path} is no recipe: {error}") from error
    trainer, model, data = (config[section].as_dict() for section in ("trainer", "model", "data"))
    return Recipe(str(path), trainer, model["init_args"], data)


def head_module(path: str | Path) -> EagleModule:
    """The module of a head's recipe. Raises FsdError as `fit` does."""
    cli = _read(path)
    module: EagleModule = cli.parser.instantiate(cli.config).model
    return module


def _read(path: str | Path) -> TrainCLI:
    argv = ["--config", str(path)]
    try:
        with _command_line(["fit", *argv]), quiet():
            return configured(argv, _Reader)
    except FsdError as error:
        raise error if str(path) in str(error) else FsdError(f"{path}: {error}") from error


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


# errors -------------------------------------------------------------------------------------------------------------


@contextmanager
def config_errors() -> Iterator[None]:
    """Turns whatever libraries raise for a configuration, before anything runs, into FsdError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            raise  # the command line says how to install it
        raise _innermost(error) or DataError(f"the configuration: {one_line(str(error))[:MOST_SAID]}") from error


@contextmanager
def run_errors() -> Iterator[None]:
    """Turns what Lightning and torch raise for settings that a run cannot have, and lost processes, into FsdError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise FsdError("the device's memory is full: lower data.batch_tokens, or model.unroll_steps.") from error
    except (MisconfigurationException, ImportError, ValueError) as error:
        raise _innermost(error) or DataError(one_line(str(error))[:MOST_SAID]) from error
    except Exception as error:
        if isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in ("gloo", "NCCL")):
            raise FsdError(
                "another process of this run has ended, or did not answer in time: see what it said, and go on with "
                f"--ckpt_path of the last checkpoint ({one_line(str(error))[:300]})."
            ) from error
        raise _innermost(error) or error from error.__cause__


def _innermost(error: BaseException) -> FsdError | None:
    """The innermost error of ours: libraries wrap what a class raises."""
    ours: FsdError | None = None
    current: BaseException | None = error
    while current is not None:
        ours = current if isinstance(current, FsdError) else ours
        current = current.__cause__
    return ours


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
    ours, handler = logging.getLogger("fsd_train"), logging.StreamHandler()
    levels = {ours: logging.INFO}
    levels.update({logging.getLogger(name): logging.WARNING for name in ("lightning.pytorch", "lightning.fabric")})
    before = {logger: logger.level for logger in levels}
    ours.addHandler(handler)
    for logger, level in levels.items():
        logger.setLevel(level)

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        print(f"warning: {one_line(str(message))}", file=sys.stderr)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message=".*JsonargparseDeprecationWarning")
            for beginning in _IDLE_WARNINGS:
                warnings.filterwarnings("ignore", message=re.escape(beginning))
            warnings.showwarning = show
            yield
    finally:
        ours.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)
