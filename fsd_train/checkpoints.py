"""Checks of checkpoints before training: whole, of the same model, target and order of batches; a run's callbacks."""

from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fsd_core.errors import CheckpointError
from fsd_infer.targets.target import Target

log = logging.getLogger(__name__)
_Callback = TypeVar("_Callback", bound=Callback)

_RESTART = "To train another one, start from its exported head as model.initial_head (a small LM: as model.drafter)."
RECORD = "training.json"  # next to an exported small LM
# words that Trainer resolves to a path or to nothing
SPECIAL = frozenset({"last", "best", "hpc", "registry"})
# a directory of a sharding strategy has one of these
_SHARDED = ("meta.pt", ".metadata", "latest", "checkpoint")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file of `fsd-train fit`, with tensors mapped from the file.

    Raises:
        CheckpointError: the file is missing, truncated or no such checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint. Give a .ckpt file of `fsd-train fit`.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is truncated or no Lightning checkpoint ({reason}). Use another.") from error
    if not isinstance(state, dict) or "state_dict" not in state or "target" not in state.get("hyper_parameters", {}):
        raise CheckpointError(f"{path} has no head: `fsd-train fit` did not write it. Use another checkpoint.")
    return state


def check_checkpoint(path: str | Path | None) -> None:
    """Raise CheckpointError unless training can resume from ``path``.

    Trainer checks None, its own words ("last", "best" ...) and addresses (``s3://...``).
    """
    if path is None or str(path).split(":")[0] in SPECIAL or "://" in str(path):
        return
    path = Path(path)
    if path.is_dir():
        if not any((path / name).exists() for name in _SHARDED):
            raise CheckpointError(f"{path} is a directory, but no sharded checkpoint. Give a .ckpt file.")
        return
    state = read_checkpoint(path)
    missing = [name for name in ("optimizer_states", "lr_schedulers", "loops") if name not in state]
    if missing:
        raise CheckpointError(
            f"{path} holds only weights (no {', '.join(missing)}), so training cannot resume from it. "
            "Use a checkpoint saved without save_weights_only."
        )
    if "batches" not in state:
        raise CheckpointError(
            f"{path} was written by an earlier version, so training cannot resume from it. Export its head with "
            "`fsd-train export` and use that as model.initial_head."
        )


def check_weights(module: LightningModule, checkpoint: dict[str, Any], source: str) -> None:
    """Raise CheckpointError unless the checkpoint's weights match this module by name and shape."""
    ours, theirs = module.state_dict(), checkpoint["state_dict"]
    wrong = sorted(set(ours) ^ set(theirs)) + [
        name for name in ours.keys() & theirs.keys() if ours[name].shape != theirs[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{source} was written with other settings: {len(wrong)} tensors differ in name or shape, first "
            f"{wrong[0]!r}. Resume with the model section of its training."
        )


def check_classes(ours: Mapping[str, Any], theirs: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError if a checkpoint has the state of another class of optimizer or schedule than a run needs.

    Args:
        ours, theirs: settings of the run's module and of the checkpoint's.
        source: name of the checkpoint in errors.
    """
    for name in ("optimizer", "lr_scheduler"):
        classes = [str(side[name].get("class_path")) for side in (theirs, ours) if isinstance(side.get(name), Mapping)]
        if len(set(classes)) > 1:
            raise CheckpointError(
                f"{source} holds the state of {classes[0]}, which {classes[1]} cannot go on from. Resume it with the "
                f"model.{name} of its training, whose other options may change."
            )


def target_record(target: Target) -> dict[str, str]:
    """Return a checkpoint's record of its target, for :func:`check_target`."""
    return {"name": target.name, "weights_sha256": target.weights_digest()}


def check_target(target: Target, record: dict[str, str], source: str) -> None:
    """Raise CheckpointError if a checkpoint was trained on another target, or on other weights of the same shape.

    Args:
        target: target of the module in training.
        record: the checkpoint's :func:`target_record`, empty if it has none.
        source: name of the checkpoint in errors.
    """
    ours, theirs = target.weights_digest(), record.get("weights_sha256")
    if ours != theirs:
        raise CheckpointError(
            f"{source} was trained on another target ({record.get('name')}, weights {theirs}) than {target.name} "
            f"(weights {ours}). {_RESTART}"
        )


def check_order(trainer: Trainer, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise CheckpointError with the differences unless both describe the same order of training batches.

    The number of devices may differ, except with DeepSpeed, whose files are per device. A warning says so if an
    optimizer step has another number of batches.

    Args:
        trainer: the trainer that resumes.
        ours, theirs: facts that determine the order, by name, of this run and of the checkpoint's.
    """
    # checkpoints of earlier versions do not say how many batches were accumulated
    factors = ("replicas", "accumulated") if "accumulated" in theirs else ("replicas",)
    before, now = (math.prod(sizes.get(name, 1) for name in factors) for sizes in (theirs, ours))
    if before != now and trainer.is_global_zero:
        log.warning(
            "%s had %d %s, and resumes with %d. Keep devices x accumulate_grad_batches.", source_of(trainer), before,
            "batches per optimizer step" if len(factors) > 1 else "devices", now,
        )  # fmt: skip
    free = {"accumulated"} if "DeepSpeed" in type(trainer.strategy).__name__ else {"accumulated", "replicas"}
    ours = {name: value for name, value in ours.items() if name not in free}
    wrong = [f"{name} ({theirs.get(name)}, now {ours[name]})" for name in ours if ours[name] != theirs.get(name)]
    if wrong:
        raise CheckpointError(
            f"{source_of(trainer)} belongs to another order of batches, by {', '.join(wrong)}. Resume it with the data "
            "section of its training, and with DeepSpeed on as many devices; rows is a digest of the training rows. "
            f"{_RESTART}"
        )


def source_of(trainer: Trainer | None) -> str:
    """Return the name of the current checkpoint in errors."""
    return "the checkpoint" if trainer is None or not trainer.ckpt_path else str(trainer.ckpt_path)


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that both have and that differ."""
    texts = [
        {name: json.dumps(value, sort_keys=True, default=repr) for name, value in config.items()}
        for config in (ours, theirs)
    ]
    return sorted(name for name in ours.keys() & theirs.keys() if texts[0][name] != texts[1][name])


def callbacks_of(trainer: Any, kind: type[_Callback]) -> list[_Callback]:
    """Return the trainer's callbacks of a kind; a connector sets them, which type checkers do not see."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]


def count_for(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Convert a checkpoint's counts of batches per device, in place, from ``before`` devices to ``now``.

    Lightning reads them after the module has loaded the checkpoint. A loader's state moves only its rows.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    for counts in (progress.get("current", {}), progress.get("total", {})):
        more = counts.get("ready", 0) * before // now - counts.get("ready", 0)
        for name in ("ready", "started", "processed", "completed"):  # the last batch may be unfinished
            if name in counts:
                counts[name] += more


def count_whole_steps(checkpoint: dict[str, Any], trainer: Trainer) -> int:
    """Let a checkpoint go on with whole optimizer steps and with the validation that is due, in place.

    A checkpoint holds no gradients. One amid accumulated batches (a resumed run saves again at the first of them) goes
    on with the first batch of their step, except with DeepSpeed, which counts batches itself. One before a validation
    goes on with it; Lightning would leave it out.

    Returns:
        the number of batches that come again
    """
    fit, loop = checkpoint["loops"]["fit_loop"], trainer.fit_loop.epoch_loop
    counts = [fit["epoch_loop.batch_progress"][name] for name in ("current", "total")]
    again = counts[0]["ready"] % trainer.accumulate_grad_batches if loop._should_accumulate() else 0
    again = 0 if "DeepSpeed" in type(trainer.strategy).__name__ else again
    ends_batch = counts[0]["completed"] < counts[0]["ready"]
    is_due = ends_batch and not again and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]
    if again:
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        for loader in fit["state_dict"].get("combined_loader", ()):
            loader["batch"] -= again
    for count in counts:
        if again:
            count.update(dict.fromkeys(("ready", "started", "processed"), count["ready"] - again))
        if again or is_due:
            count["completed"] = count["ready"] - bool(again)  # Lightning ends that batch when it resumes
    if again or ends_batch:  # Lightning resumes a validation that has begun, and no other
        for count in ("current", "total"):
            begun = {"ready": int(is_due), "started": int(is_due), "processed": 0, "completed": 0}
            fit["epoch_loop.val_loop.batch_progress"][count] = begun
    return again
