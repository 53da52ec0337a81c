"""A summary of the run before its first step, with warnings about its schedule."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

MOST_EPOCHS = 20  # beyond it a run gets a warning


class Announce(Callback):
    """Logs model, data and length of a run, and warns of a schedule that does not fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for line in (_model(trainer, pl_module), _data(trainer)):
            log.info("%s", line)
        for warning in advice(trainer, pl_module):
            log.warning("warning: %s", warning)


def _model(trainer: Trainer, module: Any) -> str:
    weights = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    cached = getattr(trainer.datamodule, "features", None)  # type: ignore[attr-defined]
    seen = "cached features" if cached else "runs in every step"
    devices = f"{trainer.world_size} x {trainer.strategy.root_device.type}"
    what = f"{type(module).__name__}: {sum(weights):,} weights to train"
    return f"{what} towards {module.target_name} ({seen}), {trainer.precision} on {devices}"


def _data(trainer: Trainer) -> str:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    rows, held = getattr(data, "train_set", None), getattr(data, "validation_set", None)
    steps, epochs = trainer.estimated_stepping_batches, _epochs(trainer)
    counted = "" if rows is None else f"{len(rows)} answers ({rows.answer_tokens} tokens); "
    held_out = f"{len(held)} held out; " if held is not None else ""
    many = "until stopped" if steps == math.inf else f"{steps:.0f} steps, {epochs:.2g} epochs"
    begun = f", {trainer.global_step} done" if trainer.global_step else ""
    return f"{counted}{held_out}{trainer.num_training_batches} batches per epoch; {many}{begun}"


def _epochs(trainer: Trainer) -> float:
    batches = float(trainer.num_training_batches)
    steps = float(trainer.estimated_stepping_batches)
    return steps * trainer.accumulate_grad_batches / batches if 0 < batches < math.inf else 0.0


def advice(trainer: Trainer, module: Any) -> list[str]:
    """Return a warning for each setting that does not fit the run."""
    warnings = []
    steps = float(trainer.estimated_stepping_batches)
    warmup = max((getattr(each.scheduler, "warmup_steps", 0) for each in trainer.lr_scheduler_configs), default=0)
    if warmup >= steps:
        warnings.append(
            f"the warm-up has {warmup} steps and the run {steps:.0f}, so the learning rate never peaks. Lower "
            f"model.lr_scheduler's warmup_steps to about {max(1, round(steps / 20))}."
        )
    epochs = _epochs(trainer)
    if MOST_EPOCHS < epochs < math.inf:
        enough = max(1, round(steps * MOST_EPOCHS / epochs))
        warnings.append(
            f"the run has {epochs:.0f} epochs. Lower trainer.max_steps to about {enough} for {MOST_EPOCHS}, or add "
            "answers."
        )
    return warnings
