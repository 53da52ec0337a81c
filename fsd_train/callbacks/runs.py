"""Directories of runs: protection against overwriting, and the choice of the checkpoint to resume."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn

from fsd_core.directories import recover_directory
from fsd_core.errors import CheckpointError, DataError
from fsd_core.locks import lock_for_run
from fsd_train.callbacks.decoded import DecodedTau
from fsd_train.callbacks.export import ExportHead, check_output, trains_again
from fsd_train.checkpoints import callbacks_of, check_checkpoint, differing, read_checkpoint

log = logging.getLogger(__name__)

AUTO = "auto"


class RunDirectory(Callback):
    """The directories of a run, protected from those of another run, and what Ctrl-C leaves in them.

    The first Ctrl-C ends the run after its step, or its batch of validation, with a checkpoint; the second ends it at
    once. SIGTERM, which schedulers and containers send before they kill, and often twice, does as the first, and so
    does the end of a terminal. With several processes it is enough that one gets the signal.

    Args:
        trainer: trainer whose callbacks name the directories of checkpoints and heads.
        overwrite: when training begins, remove checkpoints that are newer than the one it starts from.
    """

    def __init__(self, trainer: Trainer, overwrite: bool = False) -> None:
        checkpoints = [callback.dirpath for callback in callbacks_of(trainer, ModelCheckpoint)]
        heads = [callback.directory for callback in callbacks_of(trainer, ExportHead)]
        best = [callback.best for callback in callbacks_of(trainer, DecodedTau) if callback.best]
        self.directories = [Path(path) for path in dict.fromkeys(checkpoints) if path is not None]
        self.heads = [Path(path) for path in dict.fromkeys([*heads, *best]) if path is not None]
        self.best = [Path(f"{path}.ckpt") for path in best]
        self.overwrite = overwrite
        self._stale: list[Path] = []
        self._end_requested = self._has_ended = False  # to end, by a signal to this process; after the last step
        self._before = -1  # optimizer steps before the last batch
        self._sigterm_handler = signal.getsignal(signal.SIGTERM)  # Lightning's handler would call it, too
        self._reported: set[str] = set()  # of damaged checkpoints
        self._locks: list[int] = []  # descriptors of the directories, locked
        self._times_at_start = self._modification_times()  # before the choice of a checkpoint

    @property
    def checkpoints(self) -> list[Path]:
        """The existing checkpoints, newest first."""
        paths = [path for directory in self.directories for path in directory.glob("*.ckpt")]
        paths += [path for path in self.best if path.exists()]
        return sorted(paths, key=lambda path: (_step(path), path.stat().st_mtime), reverse=True)

    @property
    def names(self) -> str:
        """The directories of checkpoints, for messages."""
        return ", ".join(map(str, self.directories)) or "the run's directories"

    def newest(self) -> str | None:
        """Return the newest whole checkpoint, or None without any. Raises its CheckpointError if none is whole."""
        problems: list[CheckpointError] = []
        for path in self.checkpoints:
            try:
                check_checkpoint(path)
                return str(path)
            except CheckpointError as error:
                problems.append(error)
                if str(error) not in self._reported:
                    self._reported.add(str(error))
                    log.warning("%s", error)
        if problems:
            raise problems[0]
        return None

    def resolve(self, ckpt_path: str | None, settings: Mapping[str, Any]) -> str | None:
        """Return the checkpoint to start from, or None; "auto" is the newest whole one, if any.

        Without a path, and unless it may be overwritten, a run of the same settings goes on.

        Args:
            ckpt_path: a path, "auto" or None.
            settings: hyperparameters of the module.

        Raises:
            DataError: the directories hold a run that this one neither resumes nor may overwrite.
            CheckpointError: no checkpoint is whole.
        """
        if ckpt_path is None and not self.overwrite and self.checkpoints and not self._differing(settings):
            ckpt_path = AUTO
        if ckpt_path == AUTO:
            ckpt_path = self.newest()
            if ckpt_path is not None:
                log.info("resuming %s", ckpt_path)
                return ckpt_path
            log.info("no checkpoint in %s: training starts from the beginning", self.names)
        checkpoints = self.checkpoints
        start = None if ckpt_path is None else Path(ckpt_path)
        step = -1 if start is None or not start.exists() else _step(start)
        stale = [path for path in checkpoints if (start is None or not _same(path, start)) and _step(path) > step]
        heads = [path for path in self.heads if start is None and path.exists()]
        if self.overwrite:
            self._stale = [*stale, *heads]
        elif heads and not checkpoints and all(trains_again(path, settings) for path in heads):
            log.info("%s is of a run that was killed before its first checkpoint: it starts again", heads[0])
        elif start is None and (checkpoints or heads):
            place = (
                f"{checkpoints[0].parent} (newest checkpoint: {checkpoints[0].name})" if checkpoints else str(heads[0])
            )
            advice = "Resume it with --ckpt_path auto" if checkpoints else "It has no checkpoint to resume"
            differing_names = ", ".join(self._differing(settings)) if checkpoints else ""
            run = f"a run with another {differing_names}" if differing_names else "a run"
            raise DataError(
                f"{run} is in {place} already. {advice}, replace it with --overwrite true, or choose other directories."
            )
        elif stale and start is not None:
            raise DataError(
                f"{stale[0]} is newer than {start}, or another run's. Resume the newest with --ckpt_path auto, or "
                f"{start.name} and remove newer ones with --overwrite true."
            )
        return ckpt_path

    def _differing(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the settings in which this run and the newest checkpoint's differ."""
        newest = self.newest()
        if newest is None or not Path(newest).is_file():
            return []
        return differing(settings, read_checkpoint(newest)["hyper_parameters"])

    def check_writable(self, trainer: Trainer) -> None:
        """Raise DataError unless the run can write to all of its directories, and a head's can be replaced."""
        loggers = [Path(logger.save_dir) for logger in trainer.loggers if logger.save_dir is not None]
        directories = [*self.directories, Path(trainer.default_root_dir), *loggers]
        self._check_heads(directories)
        for path in [*directories, *self.heads]:
            existing = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
                reason = "read-only" if existing.is_dir() else "a file"
                raise DataError(f"{path} cannot be written: {existing} is {reason}.")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero:
            for directory in self.directories:
                self._lock(directory)
            if self._modification_times() != self._times_at_start:
                raise DataError(f"another run wrote to {self.names} as this one began. Give the command again.")
            for head in self.heads:
                recover_directory(head)
        for callback in callbacks_of(trainer, DecodedTau):
            callback.is_asked, callback.end_run = (lambda: self._end_requested), self._end_if_asked

    def _modification_times(self) -> dict[Path, int]:
        """Return the checkpoints and heads that are there, and when they were written [ns]."""
        paths = [*(path for place in self.directories for path in place.glob("*.ckpt")), *self.heads]
        return {path: path.stat().st_mtime_ns for path in paths if path.exists()}

    def _lock(self, directory: Path) -> None:
        """Lock a directory until the run ends, and remove what killed runs left of checkpoints that they were writing.

        Where nothing can be locked these stay: they may be another run's. Raises DataError if another run holds it.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._locks.append(os.open(directory, os.O_RDONLY))
        if lock_for_run(self._locks[-1], directory, "Wait for it, or choose another directory."):
            for partial in directory.glob(".*.ckpt.*.partial"):
                partial.unlink(missing_ok=True)

    def _unlock(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def _check_heads(self, others: Sequence[Path]) -> None:
        """Raise DataError for a head's directory that holds a model, or another of the run's directories."""
        for head in self.heads:
            within = [path for path in [*others, *self.heads] if head.resolve() in path.resolve().parents]
            within += [path for path in others if head.resolve() == path.resolve()]
            if within:
                raise DataError(f"{head} is replaced by each export, and {within[0]} with it: give the head another.")
            check_output(head)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for path in self._stale:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self._stale = []
        self._end_requested |= trainer.received_sigterm  # before the first step
        if threading.current_thread() is threading.main_thread():
            # Lightning's handler of SIGTERM ends between accumulated batches, and with several processes it waits for
            # the others within the handler, forever
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
                    signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: Any) -> None:
        if number == signal.SIGTERM and callable(self._sigterm_handler):
            self._sigterm_handler(number, frame)
        if self._end_requested or self._has_ended:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            self._end_requested = True  # after the last step too, where answers may be decoded
            return
        self._end_requested = True
        log.info("ending after this step (Ctrl-C once more: at once, without a checkpoint)")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._end_if_asked(trainer)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._end_if_asked(trainer)

    def _end_if_asked(self, trainer: Trainer) -> None:
        """Save and raise KeyboardInterrupt if a process got a signal, in all processes after the same batch."""
        if trainer.global_step == self._before:  # between accumulated batches, whose gradient would be lost
            return
        if not trainer.strategy.reduce_boolean_decision(self._end_requested, all=False):
            return
        if trainer.validating:  # the checkpoint is one of before the validation, which then comes again as a whole
            for callback in callbacks_of(trainer, WeightAveraging):
                callback.on_validation_epoch_end(trainer, trainer.lightning_module)
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            progress.reset()
            progress.increment_ready()
            progress.increment_started()
        else:  # the step's line in the log, which comes after the callbacks
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
        if self.directories:
            path = self.directories[0] / "interrupted.ckpt"
            trainer.save_checkpoint(path)
            if trainer.is_global_zero:
                log.info("saved step %d in %s", trainer.global_step, path)
        raise KeyboardInterrupt

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_ended = True
        self._restore_signals()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._unlock()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore_signals()
        self._unlock()
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero:
            newest, heads = self.checkpoints[:1], [path for path in self.heads if path.exists()]
            settings: Any = pl_module.settings
            if not newest and not all(trains_again(path, settings) for path in heads):
                log.info("%s is there, but no checkpoint: --overwrite true starts again", heads[0])
                return
            log.info("the same command goes on from %s", newest[0] if newest else "the beginning: nothing is saved")

    def _restore_signals(self) -> None:
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
            if signal.getsignal(number) == self._interrupt:
                signal.signal(number, handler)


def _step(path: Path) -> int:
    """Return a checkpoint's optimizer steps, from the name if it is sharded or damaged; -1 if unknown."""
    if path.is_file():
        try:
            return int(read_checkpoint(path)["global_step"])
        except (CheckpointError, KeyError):
            pass
    named = re.search(r"step[-=_](\d+)", path.name)
    return int(named[1]) if named else -1


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)
