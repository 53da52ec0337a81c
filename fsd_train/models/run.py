"""The common part of all training modules: optimizer, progress of the run, contents of checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fsd_core.errors import DataError, foreign_errors
from fsd_train.callbacks.safety import CheckResume, StopOnNonFinite
from fsd_train.checkpoints import callbacks_of, check_classes, count_for, count_whole_steps, source_of
from fsd_train.models.optim import WarmupCosine


def plain(value: Any) -> Any:
    """Convert an option for records and checkpoints: objects become the name of their class."""
    if is_dataclass(value) and not callable(value):  # neither a class nor a loss
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # the command line's numbers are of classes with a range
    return getattr(value, "__name__", type(value).__name__)


def changed_values(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``now`` that ``before`` lacks or has with another value."""
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def apply_changes(scheduler: Any, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Set the options of a schedule that changed between two runs, given its state at the start of each."""
    nested = [each.get("_schedulers", ()) for each in (vars(scheduler), now, before)]  # of a schedule made of others
    for inner, *states in zip(*nested, strict=False):
        apply_changes(inner, *states)
    changed = changed_values(now, before)
    vars(scheduler).update({name: changed[name] for name in changed.keys() - {"_schedulers", "_last_lr"}})


class RunModule(LightningModule):
    """LightningModule that trains the parameters of ``head`` that require gradients.

    Args:
        optimizer: optimizer of the weights; vectors (norms, biases) get no weight decay.
        lr_scheduler: schedule of the learning rate, advanced with every step.
    """

    head: Any
    seed: int = 0  # of the draws in training

    def __init__(self, optimizer: OptimizerCallable, lr_scheduler: LRSchedulerCallable) -> None:
        super().__init__()
        self.optimizer_of, self.scheduler_of = optimizer, lr_scheduler
        self._batches = 0  # training batches begun, those before a resume included
        # states of optimizer and schedule that follow from the recipe: this run's, and those of the checkpoint's run
        self._initial_states: dict[str, Any] = {}
        self._resumed_states: dict[str, Any] | None = None

    @property
    def _trainer_or_none(self) -> Trainer | None:
        """The trainer, or None."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    @property
    def _in_training(self) -> bool:
        return self._trainer_or_none is not None and bool(self.trainer.training)

    @property
    def _datamodule(self) -> Any:
        """The trainer's data module, or None."""
        return getattr(self._trainer_or_none, "datamodule", None)

    @property
    def tables(self) -> list[Tensor]:
        """Matrices of ``head`` with a row per token, which Muon does not update."""
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
        overrides: dict[str, dict[str, Any]] = {"tables": {"table": True}, "vectors": {"weight_decay": 0.0}}
        param_groups = [{"params": params, **overrides.get(kind, {})} for kind, params in groups.items() if params]
        with foreign_errors(DataError, "model.optimizer: {why}"):
            optimizer = self.optimizer_of(param_groups)
        with foreign_errors(DataError, "model.lr_scheduler: {why}"):
            scheduler = self.scheduler_of(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise DataError("model.lr_scheduler: ReduceLROnPlateau follows a metric. Give one that follows steps.")
        if not all(math.isfinite(group.get("lr", 0.0)) for group in optimizer.param_groups):
            raise DataError(f"model.optimizer: Invalid learning rate: {optimizer.param_groups[0]['lr']}")
        if isinstance(scheduler, WarmupCosine):
            scheduler.follow(self._completed_share)
        options = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._initial_states = copy.deepcopy({"groups": options, "schedule": scheduler.state_dict()})
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        """Apply options of the optimizer and the schedule that the recipe has changed since the checkpoint."""
        if self.trainer.ckpt_path is None or self._resumed_states is None:
            return
        (optimizer,), scheduler = self.trainer.optimizers, self.lr_schedulers()
        states = self._initial_states["groups"], self._resumed_states["groups"]
        for group, now, before in zip(optimizer.param_groups, *states, strict=True):
            changed = changed_values(now, before)
            if "initial_lr" in changed:  # as far below the peak as it was
                changed["lr"] = group["lr"] * (now["initial_lr"] / (before["initial_lr"] or 1.0))
            group.update(changed)
        apply_changes(scheduler, self._initial_states["schedule"], self._resumed_states["schedule"])

    def _completed_share(self, step: int) -> float:
        """Return the completed share of the run at the beginning of a step, 0 to 1: the larger share of steps or time.

        Time counts with ``trainer.max_time`` in a run of one process. The clocks of several processes differ.
        """
        total = float(self.trainer.estimated_stepping_batches)
        shares = [step / total if 0 < total < math.inf else 0.0]
        for timer in callbacks_of(self.trainer, Timer) if self.trainer.world_size == 1 else ():
            if (remaining := timer.time_remaining()) is not None:
                elapsed = timer.time_elapsed()
                shares.append(elapsed / max(elapsed + remaining, 1e-9))
        return min(max(shares), 1.0)

    @property
    def progress(self) -> float:
        """The completed share of the run, 0 to 1."""
        return self._completed_share(self.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        # dropout draws from torch's own generators, whose states no checkpoint holds
        torch.manual_seed(self._draw_seed(self._batch_number))

    @property
    def _batch_number(self) -> int:
        """Number of earlier batches, which seeds the draws of this one."""
        return max(self._batches - 1, 0)

    def _draw_seed(self, batch: int) -> int:
        """Return the seed of draws for a batch on this rank, so that a resumed run draws the same."""
        return ((self.seed * 1_000_003 + batch) * 4096 + self.global_rank) % 2**63

    def _generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a generator that depends only on seed, rank and, in training, batch number."""
        return torch.Generator(device).manual_seed(self._draw_seed(self._batch_number if self.training else 0))

    @property
    def settings(self) -> dict[str, Any]:
        """The given options by name, for records."""
        return {name: plain(value) for name, value in self.hparams.items() if not name.startswith("_")}

    def record(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        """Return the record of exported weights: completed steps, all options, and ``extra``."""
        steps = int(self.global_step) if self._trainer_or_none is not None else None
        return {"steps": steps, "hyperparameters": self.settings, **(extra or {})}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = self.settings
        checkpoint["given"] = self._initial_states
        begun = self._batches - count_whole_steps(checkpoint, self.trainer)
        checkpoint["batches"] = {"begun": begun, "replicas": self.trainer.world_size}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = self._trainer_or_none
        if self._in_training:
            check_classes(self.settings, checkpoint["hyper_parameters"], source_of(trainer))
            self._resumed_states = checkpoint.get("given")  # earlier versions wrote none, and their options stay
        counts = checkpoint.get("batches", {"begun": 0, "replicas": 0})
        before, now = counts["replicas"], 1 if trainer is None else trainer.world_size
        self._batches = counts["begun"]
        if before not in (0, now):
            self._batches = self._batches * before // now
            count_for(checkpoint, before, now)
