"""What every training module has of a run: its optimiser, how much has passed, what its checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from fsd_infer.errors import DataError
from fsd_train.callbacks.safety import CheckResume, StopOnNonFinite
from fsd_train.models.optim import WarmupCosine


def plain(value: Any) -> Any:
    """An option as records and checkpoints hold it: objects by the name of their class."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # the command line's numbers are of classes that know their range
    return getattr(value, "__name__", type(value).__name__)


class RunModule(LightningModule):
    """Trains the parameters of ``head`` that want gradients.

    Args:
        optimizer: of the weights; vectors (norms, biases) get no weight decay.
        lr_scheduler: of its learning rate, stepped with it.
    """

    head: Any

    def __init__(self, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable) -> None:
        super().__init__()
        self.optimizer_of, self.scheduler_of = optimizer, lr_scheduler
        self._batches = 0  # of training that have begun, those of resumed runs included
        self._replicas = 0  # of the run that this one resumes

    @property
    def _attached(self) -> Trainer | None:
        """The trainer, if there is one."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    @property
    def _alone(self) -> bool:
        return self._attached is None or self.trainer.world_size == 1

    @property
    def _half(self) -> bool:
        return self._attached is not None and "bf16" in str(self.trainer.precision)

    @property
    def _datamodule(self) -> Any:
        """The trainer's data module, if there is one."""
        return getattr(self._attached, "datamodule", None)

    @property
    def tables(self) -> list[Tensor]:
        """Matrices of ``head`` with a row per token, which optimisers for hidden layers leave alone."""
        return []

    def configure_callbacks(self) -> list[Callback]:
        return [CheckResume(), StopOnNonFinite()]

    def configure_optimizers(self) -> Any:
        tables = {id(table) for table in self.tables}
        groups: dict[str, list[Tensor]] = {"matrices": [], "tables": [], "vectors": []}
        for parameter in self.head.parameters():
            if parameter.requires_grad:
                kind = "vectors" if parameter.ndim != 2 else "tables" if id(parameter) in tables else "matrices"
                groups[kind].append(parameter)
        options: dict[str, dict[str, Any]] = {"tables": {"table": True}, "vectors": {"weight_decay": 0.0}}
        try:
            optimizer = self.optimizer_of(
                [{"params": params, **options.get(kind, {})} for kind, params in groups.items() if params]
            )
            scheduler = self.scheduler_of(optimizer)
        except (ValueError, TypeError) as error:
            raise error if isinstance(error, DataError) else DataError(f"model.optimizer: {error}") from error
        if isinstance(scheduler, WarmupCosine):
            scheduler.follow(self._passed)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _passed(self, step: int) -> float:
        """Which share of the run has passed when a step begins, 0 to 1: the further of steps and time.

        Time counts where ``trainer.max_time`` ends the run of one process: the clocks of several differ.
        """
        total = float(self.trainer.estimated_stepping_batches)
        shares = [step / total if 0 < total < math.inf else 0.0]
        callbacks: Any = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        for timer in callbacks if self._alone else ():
            if isinstance(timer, Timer) and (left := timer.time_remaining()) is not None:
                spent = timer.time_elapsed()
                shares.append(spent / max(spent + left, 1e-9))
        return min(max(shares), 1.0)

    @property
    def progress(self) -> float:
        """How much of the run has passed, 0 to 1."""
        return self._passed(self.global_step)

    def on_train_start(self) -> None:
        """Where another number of devices goes on: the loop counts batches per device."""
        before, now = self._replicas, self.trainer.world_size
        if before in (0, now):
            return
        # Lightning has no other way to say how far an epoch is: a loader's state moves its rows alone
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        for count in (progress.current, progress.total):
            more = count.ready * before // now - count.ready
            for name in ("ready", "started", "processed", "completed"):  # the last one may be under way
                setattr(count, name, getattr(count, name) + more)
        self._batches = self._batches * before // now

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batches += 1

    @property
    def _batch_number(self) -> int:
        """How many batches came before this one. What is drawn depends on it, so that a resumed run draws the same."""
        return max(self._batches - 1, 0)

    @property
    def settings(self) -> dict[str, Any]:
        """The options that were given, by name, for records."""
        return {name: plain(value) for name, value in self.hparams.items() if not name.startswith("_")}

    def record(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        """What is stored beside exported weights: steps so far, all options, and ``extra``."""
        steps = int(self.global_step) if self._attached is not None else None
        return {"steps": steps, "hyperparameters": self.settings, **(extra or {})}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = self.settings
        checkpoint["batches"] = {"begun": self._batches, "replicas": self.trainer.world_size}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        begun = checkpoint.get("batches", {"begun": 0, "replicas": 0})
        self._batches, self._replicas = begun["begun"], begun["replicas"]
