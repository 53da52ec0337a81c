"""Supervised tokens per second."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fsd_train.data.batches import on_host


class TokenRate(Callback):
    """Logs ``tokens_per_s``: supervised (answer) tokens per second of training, without validation.

    Args:
        window: number of batches in a mean.
    """

    def __init__(self, window: int = 20) -> None:
        self.window = window
        self._tokens = 0
        self._seconds = 0.0
        self._start: float | None = None
        self._batches = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._tokens += int(on_host(batch, "loss_mask").sum()) * trainer.world_size
        self._seconds += now - (self._start or now)
        self._start = now  # includes the wait for the next batch
        self._batches += 1
        if self._batches >= self.window:
            pl_module.log("tokens_per_s", self._tokens / max(self._seconds, 1e-9), prog_bar=True)
            self._tokens, self._seconds, self._batches = 0, 0.0, 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause()

    def pause(self) -> None:
        """Exclude the time until the next batch begins."""
        self._start = None
