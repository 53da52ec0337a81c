"""One progress bar for a whole run."""

from __future__ import annotations

import math
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm


class RunProgress(ProgressBar):
    """Progress bar over the whole run: optimizer steps, rate, time left, and the values of the last log step.

    A resumed run continues the bar. With a time limit the number of steps is an estimate. The bar syncs with the device
    only at log steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown = True
        self._bar: Any = None

    def disable(self) -> None:
        self._shown = False

    def enable(self) -> None:
        self._shown = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)), file=sys.stderr)

    def _open(self, total: float, unit: str, name: str, initial: int = 0) -> None:
        lively = sys.stderr.isatty()
        self._bar = tqdm(
            total=int(total) if 0 < total < math.inf else None, initial=initial, unit=unit, desc=name,
            disable=not self._shown, dynamic_ncols=True, smoothing=0.1, mininterval=0.5 if lively else 30.0,
        )  # fmt: skip

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        self._open(float(trainer.estimated_stepping_batches), " steps", "training", trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        done = trainer.global_step
        if done == self._bar.n:
            return
        share = float(getattr(pl_module, "progress", 0.0))
        if share > 0:
            self._bar.total = max(done, round(done / share))
        if done % self._every == 0 or done == self._bar.total:
            metrics = self.get_metrics(trainer, pl_module)
            metrics.pop("v_num", None)
            self._bar.set_postfix(metrics, refresh=False)
        self._bar.update(done - self._bar.n)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if self._bar is None:
            batches = trainer.num_val_batches
            self._open(sum(batches) if isinstance(batches, list) else batches, " batches", "validating")
        else:
            self._bar.set_description_str("validating")

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "validate":
            self._bar.update()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.state.fn == "fit":
            self._bar.set_description_str("training")
        else:
            self._close()
