"""Checkpoints are checked before anything is trained: whole, of this model and target, at a place in this order."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from fsd_infer.errors import CheckpointError
from fsd_infer.targets.target import Target

log = logging.getLogger(__name__)

_RESTART = "To train another one, start from its exported head as model.initial_head (a small LM: as model.drafter)."
# what Trainer itself resolves, to a path or to nothing
SPECIAL = frozenset({"last", "best", "hpc", "registry"})
# one of these lies in a directory that a sharding strategy wrote
_SHARDED = ("meta.pt", ".metadata", "latest", "checkpoint")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a checkpoint file of `fsd-train fit`, its tensors mapped from the file.

    Raises:
        CheckpointError: the file is missing, truncated, or something else.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint. Give a .ckpt file of `fsd-train fit`.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is truncated or no Lightning checkpoint ({reason}): use another.") from error
    if not isinstance(state, dict) or "state_dict" not in state or "target" not in state.get("hyper_parameters", {}):
        raise CheckpointError(f"{path} was not written by `fsd-train fit`: it has no head in it.")
    return state


def check_checkpoint(path: str | Path | None) -> None:
    """Raise CheckpointError unless training can go on from ``path``.

    None, the words that Trainer resolves itself ("last", "best" ...) and addresses (``s3://...``) are left to it.
    """
    if path is None or str(path).split(":")[0] in SPECIAL or "://" in str(path):
        return
    path = Path(path)
    if path.is_dir():
        if not any((path / name).exists() for name in _SHARDED):
            raise CheckpointError(f"{path} is a directory, but no sharded checkpoint: give a .ckpt file.")
        return
    state = read_checkpoint(path)
    missing = [name for name in ("optimizer_states", "lr_schedulers", "loops") if name not in state]
    if missing:
        raise CheckpointError(
            f"{path} holds weights only (no {', '.join(missing)}), so training cannot go on from it: "
            "use a checkpoint saved without save_weights_only."
        )
    if "batches" not in state:
        raise CheckpointError(
            f"{path} was written by an earlier version, so training cannot go on from it: write its head with "
            "`fsd-train export` and start from that as model.initial_head."
        )


def check_weights(module: LightningModule, checkpoint: dict[str, Any], source: str) -> None:
    """Raise CheckpointError unless the checkpoint's weights are those of this module, by name and shape."""
    ours, theirs = module.state_dict(), checkpoint["state_dict"]
    wrong = sorted(set(ours) ^ set(theirs)) + [
        name for name in ours.keys() & theirs.keys() if ours[name].shape != theirs[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{source} was written with other settings: {len(wrong)} tensors differ in name or shape, first "
            f"{wrong[0]!r}. Resume with the model section that it was trained with."
        )


def target_record(target: Target) -> dict[str, str]:
    """What a checkpoint says of the target it was trained on; for :func:`check_target`."""
    return {"name": target.name, "weights_sha256": target.weights_digest()}


def check_target(target: Target, record: dict[str, str], source: str) -> None:
    """Raise CheckpointError if a checkpoint was trained on another target, or on other weights of the same shape.

    Args:
        target: of the module in training.
        record: the checkpoint's :func:`target_record`, empty where it has none.
        source: how errors call the checkpoint.
    """
    ours, theirs = target.weights_digest(), record.get("weights_sha256")
    if ours != theirs:
        raise CheckpointError(
            f"{source} was trained on another target ({record.get('name')}, weights {theirs}) than {target.name} "
            f"(weights {ours}): resume it with that one. {_RESTART}"
        )


def check_order(trainer: Trainer, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise CheckpointError, which names the differences, unless both describe one order of training batches.

    Another number of devices goes on with a checkpoint, but not with DeepSpeed's: its files are per device.

    Args:
        trainer: about to resume.
        ours, theirs: what the order follows from, by name, in this run and in the checkpoint's.
    """
    before, now = theirs.get("replicas"), ours["replicas"]
    if before != now and "DeepSpeed" not in type(trainer.strategy).__name__:
        ours = {name: value for name, value in ours.items() if name != "replicas"}
        if trainer.is_global_zero:
            log.warning(
                "%s was written by %s devices and goes on with %d: a step has as many batches as before if devices x "
                "accumulate_grad_batches is what it was", source_of(trainer), before, now,
            )  # fmt: skip
    wrong = [f"{name} ({theirs.get(name)}, now {ours[name]})" for name in ours if ours[name] != theirs.get(name)]
    if wrong:
        raise CheckpointError(
            f"{source_of(trainer)} stands at a place in another order of batches, by {', '.join(wrong)}: resume it "
            "with the data and the number of devices that it was trained with (rows is a digest of what train_files, "
            f"max_length, the validation split and cached features leave to train on). {_RESTART}"
        )


def source_of(trainer: Trainer | None) -> str:
    """How errors call the checkpoint that is being read."""
    return "the checkpoint" if trainer is None or not trainer.ckpt_path else str(trainer.ckpt_path)
