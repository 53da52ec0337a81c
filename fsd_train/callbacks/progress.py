"""What a run shows: a summary before its first step, one progress bar, and its rate."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from fsd_bench.roofline import peak_of
from fsd_train.data.packs import on_host
from fsd_train.types import PositiveInt

log = logging.getLogger(__name__)

MAX_EPOCHS = 20  # beyond it a run gets a warning


class RunProgress(ProgressBar):
    """Progress bar over the whole run: optimizer steps, rate, time left, and the values of the last log step.

    A resumed run continues the bar. With a time limit the number of steps is an estimate. The bar syncs with the device
    only at log steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Any = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)), file=sys.stderr)

    def _open(self, total: float, unit: str, name: str, initial: int = 0) -> None:
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=int(total) if 0 < total < math.inf else None, initial=initial, unit=unit, desc=name,
            disable=not self._enabled, dynamic_ncols=True, smoothing=0.1, mininterval=0.5 if is_terminal else 30.0,
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


class Announce(Callback):
    """Logs model, data and length of a run, and warns of a schedule that does not fit."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        for line in (_model(trainer, pl_module), _data(trainer)):
            log.info("%s", line)
        for warning in advice(trainer):
            log.warning("warning: %s", warning)


def _model(trainer: Trainer, module: Any) -> str:
    weights = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    cached = getattr(trainer.datamodule, "features", None)  # type: ignore[attr-defined]
    features = "cached features" if cached else "runs in every step"
    devices = f"{trainer.world_size} x {trainer.strategy.root_device.type}"
    what = f"{type(module).__name__}: {sum(weights):,} weights to train"
    return f"{what} towards {module.target_name} ({features}), {trainer.precision} on {devices}"


def _data(trainer: Trainer) -> str:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    rows, held = getattr(data, "train_set", None), getattr(data, "validation_set", None)
    steps, epochs = trainer.estimated_stepping_batches, _epochs(trainer)
    rows_text = "" if rows is None else f"{len(rows)} answers ({rows.answer_tokens} tokens); "
    held_out_text = f"{len(held)} held out; " if held is not None else ""
    length_text = "until stopped" if steps == math.inf else f"{steps:.0f} steps, {epochs:.2g} epochs"
    done_text = f", {trainer.global_step} done" if trainer.global_step else ""
    return f"{rows_text}{held_out_text}{trainer.num_training_batches} batches per epoch; {length_text}{done_text}"


def _epochs(trainer: Trainer) -> float:
    batches = float(trainer.num_training_batches)
    steps = float(trainer.estimated_stepping_batches)
    return steps * trainer.accumulate_grad_batches / batches if 0 < batches < math.inf else 0.0


def advice(trainer: Trainer) -> list[str]:
    """Return a warning for each setting that does not fit the run."""
    warnings = []
    steps = float(trainer.estimated_stepping_batches)
    warmup = max((getattr(config.scheduler, "warmup_steps", 0) for config in trainer.lr_scheduler_configs), default=0)
    if warmup >= steps:
        warnings.append(
            f"the warm-up has {warmup} steps and the run {steps:.0f}, so the learning rate never peaks. Lower "
            f"model.lr_scheduler's warmup_steps to about {max(1, round(steps / 20))}."
        )
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    if not any(group.get("initial_lr", 1.0) for group in groups):
        warnings.append("the learning rate is 0, so nothing is trained. Raise model.optimizer's lr.")
    epochs = _epochs(trainer)
    if MAX_EPOCHS < epochs < math.inf:
        enough = max(1, round(steps * MAX_EPOCHS / epochs))
        warnings.append(
            f"the run has {epochs:.0f} epochs. Lower trainer.max_steps to about {enough} for {MAX_EPOCHS}, or add "
            "answers."
        )
    monitors = [callback for callback in trainer.callbacks if str(getattr(callback, "monitor", "")).startswith("val_")]  # type: ignore[attr-defined]
    batches = steps * trainer.accumulate_grad_batches
    val_batches = trainer.num_val_batches  # empty before the first validation
    has_rows = trainer.enable_validation and (not val_batches or sum(val_batches) > 0)
    if monitors and not (has_rows and batches >= (trainer.val_check_batch or 0)):
        names = ", ".join(f"{type(callback).__name__} of {callback.monitor}" for callback in monitors)
        warnings.append(
            f"no validation comes in this run, and without it {names} does nothing. Hold out rows, and see to "
            "trainer.limit_val_batches and trainer.val_check_interval."
        )
    return warnings


class TokenRate(Callback):
    """Logs how fast a run trains, over the last ``window`` batches:

    - ``tokens_per_s``: supervised (answer) tokens per second of all devices;
    - ``padding``: share of the batches' tokens that are padding;
    - ``gpu_gb``: the most memory that the device has held, with CUDA;
    - ``mfu``: useful operations per second (:mod:`fsd_train.models.work`) as a share of the device's bf16 peak, if
      :data:`fsd_bench.roofline.HARDWARE` has it.

    A batch's time is the median, so validations, exports and checkpoints between batches do not count.

    Args:
        window: number of batches.
    """

    def __init__(self, window: PositiveInt = 20) -> None:
        self.window = window
        self._reset()
        self._start: float | None = None

    def _reset(self) -> None:
        self._answers = self._padding = self._tokens = 0
        self._operations = 0.0
        self._seconds: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._start is None:
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self._seconds.append(now - (self._start or now))
        self._start = now  # includes the wait for the next batch
        mask = on_host(batch, "loss_mask")
        self._answers += int(mask.sum())
        self._tokens += mask.numel()
        self._padding += sum(batch["lengths"].tolist()[len(batch["ids"]) :])
        on_cuda = pl_module.device.type == "cuda"
        peak = peak_of(torch.cuda.get_device_name(pl_module.device)) if on_cuda else None
        operations: Any = getattr(pl_module, "operations", None)
        if peak is not None and operations is not None:
            self._operations += sum(operations(batch).values())
        if len(self._seconds) >= self.window:
            seconds = self.window * max(statistics.median(self._seconds), 1e-9)
            pl_module.log("tokens_per_s", self._answers * trainer.world_size / seconds, prog_bar=True)
            pl_module.log("padding", self._padding / self._tokens, prog_bar=True)
            if on_cuda:
                pl_module.log("gpu_gb", torch.cuda.max_memory_allocated(pl_module.device) / 1e9, prog_bar=True)
            if peak is not None and self._operations:
                pl_module.log("mfu", self._operations / seconds / peak, prog_bar=True)
            self._reset()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause()

    def pause(self) -> None:
        """Exclude the time until the next batch begins."""
        self._start = None
