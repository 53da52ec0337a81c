"""What every training module shares: optimiser, schedule by steps or by time, and the time a resumed run has had."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from fsd_train.callbacks.safety import CheckResume, StopOnNonFinite
from fsd_train.checkpoints import share_out_again
from fsd_train.models.optim import build_optimizer, cosine_factor
from fsd_train.models.options import ScheduleOptions


class ScheduledModule(LightningModule):
    """Trains the parameters of ``head`` that want gradients, by a warm-up and a half cosine over steps or minutes.

    A subclass makes ``head`` in ``configure_model``. With ``options.time_limit`` the schedule goes by whichever of
    steps and time is further, and training stops when it is over.

    Args:
        options: what the training of all modules has in common.
    """

    head: Any

    def __init__(self, options: ScheduleOptions) -> None:
        super().__init__()
        self.options = options
        self._seconds_before = 0.0  # training time of the runs that this one resumes
        self._started: float | None = None

    @property
    def _half(self) -> bool:
        trainer = self._trainer
        return trainer is not None and "bf16" in str(trainer.precision)

    @property
    def _datamodule(self) -> Any:
        """The trainer's data module, if there is one."""
        return getattr(self._trainer, "datamodule", None)

    @property
    def tables(self) -> list[Tensor]:
        """Matrices of ``head`` with a row per token, which optimisers for hidden layers leave alone."""
        return []

    @property
    def settings(self) -> dict[str, Any]:
        """All options by name, defaults included, for records."""
        own = {name: value for name, value in self.hparams.items() if not name.startswith("_")}
        return {**asdict(self.options), **own}

    def record(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        """What is stored beside exported weights: steps so far, all options, and ``extra``."""
        steps = int(self.global_step) if self._trainer is not None else None
        return {"steps": steps, "hyperparameters": self.settings, **(extra or {})}

    def configure_callbacks(self) -> list[Callback]:
        return [CheckResume(), StopOnNonFinite()]

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.head.parameters() if parameter.requires_grad]
        optimizer = build_optimizer(
            self.options.optimizer, parameters, self.options.lr, self.options.weight_decay, self.options.betas,
            self.tables,
        )  # fmt: skip
        total = float(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            share = max(self._time_share, step / total if total < math.inf else 0.0)
            return cosine_factor(step, self.options.warmup_steps, share, self.options.final_lr)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _seconds(self) -> float:
        """Training time so far, that of resumed runs included."""
        return self._seconds_before + (0.0 if self._started is None else time.monotonic() - self._started)

    @property
    def _time_share(self) -> float:
        limit = self.options.time_limit
        return 0.0 if limit is None else min(self._seconds / (60 * limit), 1.0)

    @property
    def progress(self) -> float:
        """How much of the run has passed, 0 to 1: the further of steps and time."""
        total = float(self.trainer.estimated_stepping_batches)
        return min(max(self._time_share, self.global_step / total if 0 < total < math.inf else 0.0), 1.0)

    def on_train_start(self) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._time_share >= 1.0:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["training_seconds"] = self._seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._seconds_before = float(checkpoint.get("training_seconds", 0.0))
        if self._trainer is not None:
            share_out_again(self._trainer, checkpoint)
