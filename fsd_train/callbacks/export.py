"""Export of the head during training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from fsd_core.errors import DataError
from fsd_infer.heads.formats import CONFIG, read_config
from fsd_infer.heads.hub import find_head
from fsd_train.callbacks.safety import check_finite
from fsd_train.checkpoints import RECORD, callbacks_of
from fsd_train.strategies import whole_head

_OF_DRAFTS = {"training", "speculators_model_type"}  # in configs of exported drafters, and of no model


class ExportHead(Callback):
    """Writes the head for `fsd-infer` at the end of training and, optionally, every n steps.

    With weight averaging, it writes the averaged weights.

    Args:
        directory: directory of the head (default: ``head`` in the trainer's log directory).
        every_n_train_steps: steps between exports (default: only at the end). An export replaces the whole directory,
            so that it always holds a usable head.
    """

    def __init__(self, directory: str | None = None, every_n_train_steps: int | None = None) -> None:
        self.directory = directory
        self.every_n_train_steps = every_n_train_steps
        self._last = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if self.every_n_train_steps and step % self.every_n_train_steps == 0 and step != self._last:
            self._last = step
            with averaged(trainer, pl_module):
                self.write(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:  # a head without a step of training is no result
            self.write(trainer, pl_module)

    def write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_finite(trainer)
        with whole_head(pl_module):  # every rank takes part if the head is sharded
            if trainer.is_global_zero:
                self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        directory = Path(self.directory or Path(log_dir(trainer)) / "head")
        draft, old = directory.with_name(directory.name + ".partial"), directory.with_name(directory.name + ".old")
        shutil.rmtree(draft, ignore_errors=True)
        metrics = {k: round(float(v), 4) for k, v in trainer.callback_metrics.items() if k.startswith("val_")}
        data = [Path(file).name for file in getattr(getattr(trainer, "datamodule", None), "train_files", [])]
        pl_module.export(draft, {"metrics": metrics, "data": data})  # type: ignore[operator]
        shutil.rmtree(old, ignore_errors=True)
        if directory.exists():
            os.replace(directory, old)
        os.replace(draft, directory)
        shutil.rmtree(old, ignore_errors=True)


def check_output(directory: Path) -> None:
    """Raise DataError for a directory with a model that no export wrote, since an export replaces its files.

    Raises CheckpointError for a directory whose config is malformed.
    """
    if not (directory / CONFIG).is_file() or (directory / RECORD).is_file():
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
