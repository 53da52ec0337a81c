"""Safety of runs: stop at NaN before an optimizer step, refuse damaged checkpoints before a restore."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsd_core.errors import NonFiniteLossError, causes
from fsd_core.files import replacing
from fsd_train.checkpoints import callbacks_of, check_checkpoint


class StopOnNonFinite(Callback):
    """Stops training at a NaN or infinite loss or gradient.

    It names the rows of the batch (or of all accumulated batches, if only the gradient is bad) in
    ``non-finite-step-N-rank-R.json`` in the trainer's log directory. Nothing is saved afterwards, so the last
    checkpoint is good. EagleModule and LMModule add this callback themselves.

    The verdict is computed on the device, to avoid a sync within the step. It is read at the next batch, or before a
    checkpoint, export, validation or decode.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._step_batches: list[tuple[Tensor, list[Any]]] = []  # loss and rows of the batches since the last step
        self._unread: _Verdict | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.check_finite(trainer)
        self._batch = batch

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._step_batches.append((loss.detach(), list(self._batch["ids"])))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.check_finite(trainer)
        batches, self._step_batches = self._step_batches, []
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        values = torch.stack([loss.float() for loss, _ in batches] + [torch.zeros((), device=pl_module.device)])
        # a gradient scaler (fp16) skips steps with infinite gradients itself
        if gradients and getattr(trainer.precision_plugin, "scaler", None) is None:
            norm = torch.nn.utils.get_total_norm(gradients)
            values[-1] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # all ranks stop together, so that none waits for another
        finite = trainer.strategy.reduce(values.isfinite().all().float(), reduce_op="mean")
        # an event says when the copy is done; only CUDA has them here
        host = torch.cat([values, finite.reshape(1)]).to("cpu", non_blocking=values.is_cuda)
        event = torch.cuda.Event() if values.is_cuda else None
        if event is not None:
            event.record()
        self._unread = _Verdict(trainer.global_step, host, [rows for _, rows in batches], event)
        if event is None:
            self.check_finite(trainer)

    def check_finite(self, trainer: Trainer) -> None:
        """Read the last verdict. Raises NonFiniteLossError if it is bad."""
        verdict, self._unread = self._unread, None
        if verdict is None:
            return
        if verdict.event is not None:
            verdict.event.synchronize()
        *losses, norm, finite = verdict.values.tolist()
        if finite == 1.0:
            return
        batches = [{"loss": str(loss), "ids": ids} for loss, ids in zip(losses, verdict.rows)]  # NaN is no JSON
        bad = [entry for loss, entry in zip(losses, batches) if not math.isfinite(loss)]
        what = f"loss is {bad[0]['loss']}" if bad else "loss or the gradient is not finite on another rank"
        if not bad and not math.isfinite(norm):
            what, bad = "gradient is not finite", batches
        path = Path(trainer.log_dir or trainer.default_root_dir)
        path = path / f"non-finite-step-{verdict.step}-rank-{trainer.global_rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step": verdict.step, "what": what, "batches": bad}, indent=1) + "\n")
        raise NonFiniteLossError(
            f"training stopped at step {verdict.step}: the {what}. {path} names the rows of the batch. "
            f"{_last_checkpoint(trainer)} Check these rows, or resume with a lower learning rate or "
            "trainer.gradient_clip_val."
        )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.check_finite(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.check_finite(trainer)

    on_train_end = on_validation_start


@dataclass(frozen=True)
class _Verdict:
    """A step's losses, gradient norm, and whether all ranks are finite, on the way to the host."""

    step: int
    values: Tensor
    rows: list[list[Any]]
    event: Any


def check_finite(trainer: Trainer) -> None:
    """Raise NonFiniteLossError if the last step was bad, before its weights are used."""
    for callback in callbacks_of(trainer, StopOnNonFinite):
        callback.check_finite(trainer)


def _last_checkpoint(trainer: Trainer) -> str:
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        if path:
            return f"The last checkpoint is {path}."
    return "There is no checkpoint yet." if not trainer.ckpt_path else f"The last checkpoint is {trainer.ckpt_path}."


class CheckResume(Callback):
    """Refuses a truncated or foreign checkpoint by name before a restore, and names one that cannot be written.

    EagleModule and LMModule add this callback themselves. It leaves alone sharding strategies, which read their own
    checkpoints, and a user's CheckpointIO.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # callbacks do not know the path yet, but every file passes the strategy's reader
        if stage == "fit" and type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = _Checked()


class _Checked(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # Lightning's own writer fills memory and the system's temporary directory, and copies from there: it fails
        # where only that is full, and a kill during the copy leaves a torn file
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path) as draft, draft.open("wb") as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:  # torch's writer raises it when it closes the file, after the disk's error
            full = next((cause for cause in causes(error, implicit=True) if isinstance(cause, OSError)), None)
            if full is None:
                raise
            raise OSError(full.errno, full.strerror, str(path)) from error

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        check_checkpoint(path)
        return super().load_checkpoint(path, *args, **options)
