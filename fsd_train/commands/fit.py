"""`fsd-train fit` and `fsd-train validate`: LightningCLI with one-line errors for recipes and options."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.callbacks import ProgressBar, WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import disable_possible_user_warnings
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fsd_core.console import load_plugins, one_line
from fsd_core.errors import DataError, FsdError, causes
from fsd_infer.drafters.loading import refuse_head
from fsd_train.callbacks.export import ExportHead, training_record
from fsd_train.callbacks.progress import Announce, RunProgress
from fsd_train.callbacks.runs import AUTO, RunDirectory
from fsd_train.checkpoints import callbacks_of, check_checkpoint, read_checkpoint
from fsd_train.commands.recipe_keys import check_nulls, class_of
from fsd_train.commands.short_recipe import written_out
from fsd_train.data.module import AnswersDataModule
from fsd_train.models import DistillationModule
from fsd_train.strategies import check_ranks, named_strategy
from fsd_train.types import in_words

log = logging.getLogger(__name__)

CPU_PROCESSES = 8  # devices that a CPU of fewer cores may be asked for, to try a run out
MAX_SHOWN = 800  # characters shown of a library's message
_TUNER = "lightning.pytorch.tuner"  # of Lightning's callbacks LearningRateFinder and BatchSizeFinder
HEAD = ("--model", "fsd_train.models.EagleModule")  # class of a model section without class_path
# beginnings of Lightning's messages that ask for no action and have no setting and no category of their own
_IDLE_WARNINGS = (
    "`isinstance(treespec, LeafSpec)`", "Checkpoint directory", "LightningCLI's args parameter",
    "Experiment logs directory", "Total length of `list` across ranks is zero", "The dirpath has changed",
)  # fmt: skip


class RecipeParser(LightningArgumentParser):
    """Parser that raises an error instead of printing its usage and exiting."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # the parser of the section that holds an unknown option names the section
        kind = ValueError if message.startswith("Option ") else FsdError
        raise kind(in_words(one_line(message))[:MAX_SHOWN]) from ex


class TrainCLI(LightningCLI):
    """LightningCLI for this package's modules; it reads, checks and builds a recipe without running it."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path", type=str | None, default=None,
            help="checkpoint to resume or to validate; auto: the newest in the run's directories",
        )  # fmt: skip
        parser.add_argument(
            "--overwrite", type=bool, default=False,
            help="fit: remove checkpoints and heads of another run in this run's directories",
        )  # fmt: skip
        parser.add_argument(
            "--import", type=list[str], default=[],
            help="modules to import first, which register losses, or hold classes, of your own",
        )  # fmt: skip

    def before_instantiate_classes(self) -> None:
        sections = {name: self.config.get(name) for name in ("trainer", "model", "data")}
        sections["model.head"] = self.config.get("model.init_args.head", Namespace())
        for name, section in sections.items():
            if not isinstance(section, Namespace):
                raise FsdError(f"the section {name} holds no options. See recipes/template.yaml.")
        refuse_head(Path(self.config["model.init_args.target"]))
        for name in {"dtype", "device"} & (self.config.get("model.init_args.target_kwargs") or {}).keys():
            raise DataError(f"model.target_kwargs.{name}: the trainer's options choose it. Leave it out.")
        check_nulls("data", AnswersDataModule, sections["data"])
        check_nulls("model", class_of(self.config["model.class_path"]), self.config["model.init_args"])
        callbacks = sections["trainer"].get("callbacks")
        for callback in callbacks if isinstance(callbacks, list) else []:
            if callback["class_path"].startswith("fsd_"):  # null may mean something to others
                check_nulls("trainer.callbacks", class_of(callback["class_path"]), callback.get("init_args") or {})
        if self.config.get("ckpt_path") != AUTO:
            check_checkpoint(self.config.get("ckpt_path"))  # before anything is loaded

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self.config_init["trainer"]
        check_trainer(options)
        if isinstance(options.get("strategy"), str):
            kwargs.setdefault("strategy", named_strategy(options["strategy"]))
        is_mixed = options.get("precision") == "bf16-mixed" and on_cpu(options.get("accelerator") or "auto")
        if is_mixed and not has_bf16_products():
            log.info("trainer.precision: 32-true, since bf16 is several times slower on this processor")
            kwargs.setdefault("precision", "32-true")
        callbacks = options.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        callbacks = sorted(callbacks, key=lambda c: not isinstance(c, WeightAveraging))  # others read its average
        if options.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(RunProgress())
        return super().instantiate_trainer(**{**kwargs, "callbacks": [Announce(), *callbacks]})

    def prepare_run(self) -> str | None:
        """Check that the run trains, and its directories; return the checkpoint to resume, or None."""
        for name in ("max_steps", "max_epochs", "limit_train_batches"):
            if getattr(self.trainer, name) == 0:
                raise DataError(f"trainer.{name} is 0, so no step would be trained. Raise it, or omit it.")
        check_ranks(self.trainer)
        directory = RunDirectory(self.trainer, self.config["overwrite"])
        directory.check_writable(self.trainer)
        path = directory.resolve(self.config.get("ckpt_path"), self.model.settings)
        self.trainer.callbacks.append(directory)  # type: ignore[attr-defined]
        return path


# options that Lightning divides by, or reads as "off" below these
_MIN = {"accumulate_grad_batches": 1, "gradient_clip_val": 0, "log_every_n_steps": 0}


def check_trainer(options: Namespace) -> None:
    """Raise DataError for values of the trainer section that Lightning neither takes nor refuses."""
    for name, least in _MIN.items():
        value = options.get(name)
        is_null = value is None and name == "accumulate_grad_batches"
        if is_null or isinstance(value, int | float) and not value >= least:
            raise DataError(f"trainer.{name}: expected a number >= {least}, got {'null' if is_null else value}.")
    if options.get("val_check_interval") == 0:
        raise DataError("trainer.val_check_interval is 0: give a number of steps, or trainer.limit_val_batches 0.")
    devices, most = str(options.get("devices", "")), max(os.cpu_count() or 1, CPU_PROCESSES)
    if devices.isdecimal() and int(devices) > most and on_cpu(options.get("accelerator") or "auto"):
        raise DataError(f"trainer.devices is {devices}, a process each, but this CPU has {os.cpu_count()} cores.")


def has_bf16_products() -> bool:
    """Return whether oneDNN multiplies bf16 on this processor. Torch's own bf16 products are slower than fp32 ones."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def on_cpu(accelerator: str | Accelerator) -> bool:
    """Return whether ``trainer.accelerator`` means the CPU."""
    if accelerator == "auto":
        return not torch.accelerator.is_available()
    return accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)


class _RecipeReader(TrainCLI):
    """A CLI that reads and checks without building."""

    def instantiate_classes(self) -> None:
        pass


def main(argv: Sequence[str]) -> int:
    """Run `fit` or `validate`, the first argument."""
    with quiet():
        cli = configured(argv[1:])
        with run_errors(), interrupts(cli.trainer):
            if argv[0] == "fit":
                path = cli.prepare_run()
                is_automatic = cli.config.get("ckpt_path") in (None, AUTO)
                if path is not None and is_automatic and _is_complete(path, cli.trainer):
                    return 0
                cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=path)
                if cli.trainer.global_step == 0:
                    raise DataError("the run ended before its first step, so there is no head. Give it more time.")
            else:
                _validate(cli)
    return 0


def _is_complete(path: str, trainer: Trainer) -> bool:
    """Return whether a checkpoint and the heads have all steps of the run already, and say so."""
    steps = int(read_checkpoint(path)["global_step"]) if Path(path).is_file() else 0
    heads = [Path(export.directory) for export in callbacks_of(trainer, ExportHead) if export.directory is not None]
    if not 0 < trainer.max_steps <= steps or any(training_record(head).get("steps") != steps for head in heads):
        return False
    log.info("%s has %d steps: nothing is left to train. Raise trainer.max_steps, or start again with "
             "--overwrite true.", path, steps)  # fmt: skip
    return True


@contextmanager
def interrupts(trainer: Trainer) -> Iterator[None]:
    """Raise KeyboardInterrupt where Lightning, after a signal, exits with the status of an error or of success."""
    try:
        yield
    except SystemExit:
        if trainer.state.status != TrainerStatus.INTERRUPTED:
            raise
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt from None


def _validate(cli: TrainCLI) -> None:
    """Measure a checkpoint, or the initial weights. Raises DataError without a checkpoint or rows to measure."""
    path = cli.config.get("ckpt_path")
    if path == AUTO:
        directory = RunDirectory(cli.trainer)
        path = directory.newest()
        if path is None:
            raise DataError(f"no checkpoint in {directory.names}. Give one as --ckpt_path.")
    log.info("validating %s", path or "the initial weights. For the newest checkpoint add --ckpt_path auto")
    if not cli.trainer.validate(cli.model, datamodule=cli.datamodule, ckpt_path=path):
        raise DataError(
            "no batch to validate. Set data.validation_fraction or data.validation_files, and limit_val_batches not 0."
        )


def configured(argv: Sequence[str], kind: type[TrainCLI] = TrainCLI) -> TrainCLI:
    """Build trainer, module and data from a command line. Raises FsdError for a bad option."""
    with config_errors():
        words, modules = written_out(argv)
        load_plugins(modules)
        return kind(
            DistillationModule,
            AnswersDataModule,
            subclass_mode_model=True,
            parser_class=RecipeParser,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            # the data module's sampler divides batches among replicas
            trainer_defaults={"use_distributed_sampler": False, "enable_model_summary": False},
            # a resumed run replaces the record of its settings
            save_config_kwargs={"overwrite": True},
            args=[*HEAD, *words],
            run=False,
        )


@dataclass(frozen=True)
class Recipe:
    """The sections of a recipe with defaults.

    Attributes:
        path: path of its file.
        kind: class of the module.
        trainer, model, data: options, those of ``model`` for this class.
        build: makes the module; raises FsdError like `fit`.
    """

    path: str
    kind: type[DistillationModule]
    trainer: dict[str, Any]
    model: dict[str, Any]
    data: dict[str, Any]
    build: Callable[[], DistillationModule]

    @property
    def steps(self) -> int:
        """Optimizer steps, 0 if the recipe sets no limit."""
        return int(self.trainer.get("max_steps") or 0)

    @property
    def accumulated(self) -> int:
        """Batches per optimizer step."""
        return int(self.trainer.get("accumulate_grad_batches") or 1)


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe with the checks of `fit`. Raises FsdError with the file's name."""
    try:
        with quiet():
            cli = configured(["--config", str(path)], _RecipeReader)
    except FsdError as error:
        if str(path) in str(error):
            raise
        raise FsdError(f"{path} is not a recipe: {error}") from error
    trainer, model, data = (cli.config[section].as_dict() for section in ("trainer", "model", "data"))
    kind = class_of(model["class_path"])
    return Recipe(str(path), kind, trainer, model["init_args"], data, lambda: cli.parser.instantiate(cli.config).model)


def target_kwargs_of(recipe: Recipe, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the keywords of a recipe's target, or those ``given``, with what its data say of the tokenizer."""
    kwargs = dict(given or recipe.model.get("target_kwargs") or {})
    return {**kwargs, "allow_control_tokens": True} if recipe.data.get("allow_control_tokens") else kwargs


# errors -------------------------------------------------------------------------------------------------------------


@contextmanager
def config_errors() -> Iterator[None]:
    """Turn every exception about a configuration into FsdError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            raise  # the command line names the package to install
        raise_ours(error, DataError(f"the configuration: {in_words(one_line(str(error)))[:MAX_SHOWN]}"))


@contextmanager
def run_errors() -> Iterator[None]:
    """Turn exceptions of Lightning and torch about settings, compilers and lost processes into FsdError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise FsdError("the device is out of memory. Lower data.batch_tokens or model.unroll_steps.") from error
    except torch._dynamo.exc.TorchDynamoException as error:
        cure = "Install a C++ compiler, or set model.compile to false."
        raise_ours(error, FsdError(f"torch.compile failed ({one_line(str(error))[:300]}). {cure}"))
    except (MisconfigurationException, ImportError, ValueError) as error:
        raise_ours(error, DataError(one_line(str(error))[:MAX_SHOWN]))
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        says, lost, module = one_line(str(error))[:300], "", str(frame.f_globals.get("__name__"))
        cut_off = isinstance(error, (ConnectionError, EOFError)) and module.startswith("multiprocessing")
        if cut_off or says.startswith("DataLoader worker (pid"):  # raised wherever the run is then
            lost = f"a data worker has ended, as when memory runs out ({says}). Lower data.num_workers"
        if isinstance(error, torch.distributed.DistError) or any(name in str(error) for name in ("gloo", "NCCL")):
            lost = f"another process of this run has ended, or did not answer in time ({says}). See its output"
        if lost:
            raise FsdError(f"{lost}, and resume the last checkpoint with --ckpt_path.") from error
        of_callbacks = module.startswith(("lightning.pytorch.callbacks", _TUNER))
        raise_ours(error, DataError(f"trainer.callbacks: {one_line(str(error))[:MAX_SHOWN]}") if of_callbacks else None)


def raise_ours(error: Exception, otherwise: FsdError | None) -> NoReturn:
    """Raise the innermost FsdError that led to ``error``, because libraries wrap exceptions.

    If it was raised from another FsdError, such as that of a row without its place, or one quotes it, as that of a
    whole key does, the outer one of these is raised. Without any, raise ``otherwise``, or ``error`` if that is None.
    """
    inner: FsdError | None = None
    before: BaseException | None = None
    for cause in causes(error):
        if isinstance(cause, FsdError) and not isinstance(before, FsdError):
            inner = cause if inner is None or str(cause) not in str(inner) else inner
        before = cause
    if inner is not None:
        raise inner  # it keeps its own cause, and must not become the cause of itself
    if otherwise is None:
        raise error
    raise otherwise from error


# what is printed ----------------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Print our log lines plainly and warnings on one line; hide Lightning's notices."""
    ours, handler = logging.getLogger("fsd_train"), logging.StreamHandler()
    levels = {ours: logging.INFO}
    levels |= {logging.getLogger(name): logging.WARNING for name in ("lightning.pytorch", "lightning.fabric")}
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
            disable_possible_user_warnings()
            for beginning in _IDLE_WARNINGS:
                warnings.filterwarnings("ignore", message=re.escape(beginning))
            warnings.showwarning = show
            yield
    finally:
        ours.removeHandler(handler)
        for logger, level in before.items():
            logger.setLevel(level)
