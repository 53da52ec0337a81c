"""Export of the head during training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from fsd_core.directories import replacing_directory
from fsd_core.errors import DataError, FsdError
from fsd_core.files import read_json
from fsd_infer.heads.formats import read_config
from fsd_infer.heads.hub import find_head
from fsd_infer.heads.stored_parts import CONFIG
from fsd_train.callbacks.safety import check_finite
from fsd_train.checkpoints import RECORD, callbacks_of, differing
from fsd_train.strategies import whole_head
from fsd_train.types import PositiveInt

_TRAINING = "training"  # the record of the training, in configs of exported heads
_OF_DRAFTS = {_TRAINING, "speculators_model_type"}  # in configs of exported drafters, and of no model
_UNSAVED = "before_first_checkpoint"  # in a record: the run could not go on from this step


class ExportHead(Callback):
    """Writes the head for `fsd-infer` at the end of training and, optionally, every n steps.

    With weight averaging, it writes the averaged weights.

    Args:
        directory: directory of the head (default: ``head`` in the trainer's log directory).
        every_n_train_steps: steps between exports (default: only at the end). An export replaces the whole directory,
            so that it always holds a usable head.
    """

    def __init__(self, directory: str | None = None, every_n_train_steps: PositiveInt | None = None) -> None:
        self.directory = directory
        self.every_n_train_steps = every_n_train_steps
        self._last = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and step != self._last:
            self._last = step
            saved = [saver.best_model_path or saver.last_model_path for saver in callbacks_of(trainer, ModelCheckpoint)]
            with averaged(trainer, pl_module):
                self.write(trainer, pl_module, unsaved=bool(saved) and not any([*saved, trainer.ckpt_path]))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:  # a head without a step of training is no result
            self.write(trainer, pl_module)

    def write(self, trainer: Trainer, pl_module: LightningModule, unsaved: bool = False) -> None:
        """Replace the directory. ``unsaved``: the run goes on, and has no checkpoint yet."""
        check_finite(trainer)
        with whole_head(pl_module):  # every rank takes part if the head is sharded
            if trainer.is_global_zero:
                self._write(trainer, pl_module, {_UNSAVED: True} if unsaved else {})

    def _write(self, trainer: Trainer, pl_module: LightningModule, more: dict[str, Any]) -> None:
        directory = Path(self.directory or Path(log_dir(trainer)) / "head")
        metrics = {k: round(float(v), 4) for k, v in trainer.callback_metrics.items() if k.startswith("val_")}
        data = [Path(file).name for file in getattr(getattr(trainer, "datamodule", None), "train_files", [])]
        with replacing_directory(directory) as partial:
            pl_module.export(partial, {"metrics": metrics, "data": data, **more})  # type: ignore[operator]


def trains_again(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a run of these settings, from its beginning, writes the head that a killed run left here.

    That run had not saved a checkpoint, so nothing but this can be done with it.
    """
    record = training_record(directory)
    theirs = record.get("hyperparameters")
    return record.get(_UNSAVED) is True and isinstance(theirs, dict) and not differing(settings, theirs)


def training_record(directory: Path) -> dict[str, Any]:
    """Return the record of the training of an exported drafter; an empty one if there is none."""
    file = directory / RECORD
    try:
        record = read_json(file, "") if file.is_file() else read_config(directory).get(_TRAINING)
    except FsdError:
        return {}
    return record if isinstance(record, dict) else {}


def check_output(directory: Path, or_model: bool = False) -> None:
    """Raise DataError for a directory that an export may not replace: one whose files no export wrote, or one in use.

    ``or_model``: it may hold a model. Raises CheckpointError for a directory whose config is malformed.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise DataError(f"{directory} is a file. Give a directory.")
    place, here = directory.resolve(), Path.cwd()
    if place in (here, *here.parents) or os.path.ismount(place):
        raise DataError(f"{directory} is in use, and cannot be replaced. Give the name of a new directory in it.")
    if (directory / RECORD).is_file() or not any(directory.iterdir()):
        return
    if not (directory / CONFIG).is_file():
        raise DataError(f"{directory} holds files, but no head. The export would remove them. Give another directory.")
    if or_model:
        return
    if not read_config(directory).keys() & _OF_DRAFTS and find_head(directory.absolute()) is None:
        raise DataError(f"{directory} holds a model, which the export would replace. Give another directory.")


def log_dir(trainer: Trainer) -> str:
    return trainer.log_dir or trainer.default_root_dir


@contextmanager
def averaged(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Give the module the weights for validation within the context: the averaged ones if a callback averages."""
    averaging = callbacks_of(trainer, WeightAveraging)
    for callback in averaging:
        callback.on_validation_epoch_start(trainer, pl_module)
    try:
        yield
    finally:
        for callback in averaging:
            callback.on_validation_epoch_end(trainer, pl_module)
