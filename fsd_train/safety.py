"""What keeps a run safe: checkpoints are checked before anything is trained, and a NaN stops it before it spreads."""

from __future__ import annotations

import json
import logging
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsd_infer.errors import CheckpointError, NonFiniteLossError
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


def check_state(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Raise CheckpointError unless the checkpoint's weights are those of this module, by name and shape."""
    trainer = module._trainer
    if trainer is not None and trainer.strategy.restore_checkpoint_after_setup:
        return  # sharded by now: the strategy compares them
    ours, theirs = module.state_dict(), checkpoint["state_dict"]
    wrong = sorted(set(ours) ^ set(theirs)) + [
        name for name in ours.keys() & theirs.keys() if ours[name].shape != theirs[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"{_source(trainer)} was written with other settings: {len(wrong)} tensors differ in name or shape, first "
            f"{wrong[0]!r}. Resume with the model section that it was trained with."
        )


def target_record(target: Target) -> dict[str, str]:
    """What a checkpoint says of the target it was trained on; for :func:`check_target`."""
    return {"name": target.name, "weights_sha256": target.weights_digest()}


def check_target(module: LightningModule, target: Target, record: dict[str, str]) -> None:
    """Raise CheckpointError if a checkpoint was trained on another target, or on other weights of the same shape.

    Args:
        module: in training.
        target: its target.
        record: the checkpoint's :func:`target_record`, empty where it has none.
    """
    ours, theirs = target.weights_digest(), record.get("weights_sha256")
    if ours != theirs:
        raise CheckpointError(
            f"{_source(module._trainer)} was trained on another target ({record.get('name')}, weights {theirs}) than "
            f"{target.name} (weights {ours}): resume it with that one. {_RESTART}"
        )


def check_order(trainer: Trainer, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise CheckpointError, which names the differences, unless both describe one order of training batches.

    Args:
        trainer: about to resume.
        ours, theirs: what the order follows from, by name, in this run and in the checkpoint's.
    """
    wrong = [f"{name} ({theirs.get(name)}, now {ours[name]})" for name in ours if ours[name] != theirs.get(name)]
    if wrong:
        raise CheckpointError(
            f"{_source(trainer)} stands at a place in another order of batches, by {', '.join(wrong)}: resume it with "
            "the data and the number of devices that it was trained with (rows is a digest of what train_files, "
            f"max_length, the validation split and cached features leave to train on). {_RESTART}"
        )


def share_out_again(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let another number of devices go on with a checkpoint: its place in the order counts batches per device.

    The k-th batches of n devices are the first n·k of the order, so m devices have had n·k / m each. Changes the
    checkpoint in place. DeepSpeed's is left alone, and refused by :func:`check_order`: its files are per device.

    Raises:
        CheckpointError: the devices cannot have had as many batches each.
    """
    order = checkpoint.get(type(getattr(trainer, "datamodule", None)).__qualname__)
    if order is None or trainer.state.fn != "fit" or "DeepSpeed" in type(trainer.strategy).__name__:
        return
    before, now = order["replicas"], trainer.world_size
    if before == now:
        return
    loop = checkpoint["loops"]["fit_loop"]
    given = loop["epoch_loop.batch_progress"]["current"]["ready"] * before
    if given % now:
        raise CheckpointError(
            f"{_source(trainer)} was written by {before} devices after {given} batches of its epoch, which {now} "
            "cannot share evenly: use a checkpoint of another step, or another number of devices."
        )
    for counts in (loop["epoch_loop.batch_progress"][name] for name in ("current", "total")):
        more = counts["ready"] * before // now - counts["ready"]
        counts.update({name: count + more for name, count in counts.items()})  # the last one may be under way
    for loader in loop["state_dict"]["combined_loader"]:
        loader["batch"] = given // now
    order["replicas"] = now
    if trainer.is_global_zero:
        log.warning(
            "%s was written by %d devices and goes on with %d: a step has as many batches as before if devices x "
            "accumulate_grad_batches is what it was", _source(trainer), before, now,
        )  # fmt: skip


def _source(trainer: Trainer | None) -> str:
    """How errors call the checkpoint that is being read."""
    return "the checkpoint" if trainer is None or not trainer.ckpt_path else str(trainer.ckpt_path)


class StopOnNonFinite(Callback):
    """Stops training at a NaN or infinite loss or gradient.

    The rows of the batch (of all accumulated batches, if only the gradient shows it) are written to
    ``non-finite-step-N-rank-R.json``, and nothing is saved any more, so the last checkpoint is a good one. EagleModule
    and LMModule bring this callback with them.

    The verdict is computed on the device and read when the next batch begins, or before anything is saved, exported,
    validated or decoded, so that the device is not waited for in the middle of a step.

    Args:
        directory: of that file; default the trainer's log directory.
    """

    def __init__(self, directory: str | None = None) -> None:
        self.directory = directory
        self._batch: Any = None
        self._seen: list[tuple[Tensor, list[Any]]] = []  # loss and rows of the batches since the last step
        self._unread: _Verdict | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.settle(trainer)
        self._batch = batch

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._seen.append((loss.detach(), _row_ids(self._batch)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.settle(trainer)
        seen, self._seen = self._seen, []
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        values = torch.stack([loss.float() for loss, _ in seen] + [torch.zeros((), device=pl_module.device)])
        # with a gradient scaler (fp16) infinite gradients are its business: it leaves such steps out
        if gradients and getattr(trainer.precision_plugin, "scaler", None) is None:
            norm = torch.nn.utils.get_total_norm(gradients)
            values[-1] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # all ranks stop together, or the others would wait for this one
        finite = trainer.strategy.reduce(values.isfinite().all().float(), reduce_op="mean")
        # elsewhere nothing says when such a copy is done
        host = torch.cat([values, finite.reshape(1)]).to("cpu", non_blocking=values.is_cuda)
        event = torch.cuda.Event() if values.is_cuda else None
        if event is not None:
            event.record()
        self._unread = _Verdict(trainer.global_step, host, [rows for _, rows in seen], event)
        if event is None:
            self.settle(trainer)

    def settle(self, trainer: Trainer) -> None:
        """Reads the last verdict. Raises NonFiniteLossError if it is bad."""
        verdict, self._unread = self._unread, None
        if verdict is None:
            return
        if verdict.event is not None:
            verdict.event.synchronize()
        *losses, norm, finite = verdict.values.tolist()
        if finite == 1.0:
            return
        seen = [{"loss": str(loss), "ids": ids} for loss, ids in zip(losses, verdict.rows)]  # NaN is no JSON
        bad = [entry for loss, entry in zip(losses, seen) if not math.isfinite(loss)]
        what = f"loss is {bad[0]['loss']}" if bad else "loss or the gradient is not finite on another rank"
        if not bad and not math.isfinite(norm):
            what, bad = "gradient is not finite", seen
        path = Path(self.directory or trainer.log_dir or trainer.default_root_dir)
        path = path / f"non-finite-step-{verdict.step}-rank-{trainer.global_rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step": verdict.step, "what": what, "batches": bad}, indent=1) + "\n")
        raise NonFiniteLossError(
            f"the {what} at step {verdict.step}: training stopped there. The rows of the batch are named in {path}. "
            f"{_last_checkpoint(trainer)} Look at these rows, or resume with a lower learning rate or "
            "trainer.gradient_clip_val."
        )

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.settle(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle(trainer)

    on_train_end = on_validation_start


@dataclass(frozen=True)
class _Verdict:
    """A step's losses, gradient norm and whether all is finite on all ranks, on the way to the host."""

    step: int
    values: Tensor
    rows: list[list[Any]]
    event: Any


def settle(trainer: Trainer) -> None:
    """Raise NonFiniteLossError now if the last step was bad, before its weights are used for anything."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, StopOnNonFinite):
            callback.settle(trainer)


def _row_ids(batch: Any) -> list[Any]:
    """The ids of a batch's rows, or their numbers, or nothing."""
    if not isinstance(batch, dict):
        return []
    ids: Any = batch.get("ids", batch.get("index", []))
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def _last_checkpoint(trainer: Trainer) -> str:
    for callback in trainer.checkpoint_callbacks:
        path = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        if path:
            return f"The last checkpoint is {path}."
    return "There is no checkpoint yet." if not trainer.ckpt_path else f"The last checkpoint is {trainer.ckpt_path}."


class CheckResume(Callback):
    """Refuses a truncated or foreign checkpoint by name before anything of it is restored.

    EagleModule and LMModule bring this callback with them. Sharding strategies read their checkpoints themselves.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # the path is not known to callbacks yet, but every file goes through the strategy's reader
        if stage == "fit" and not isinstance(trainer.strategy.checkpoint_io, _Checked):
            trainer.strategy.checkpoint_io = _Checked(trainer.strategy.checkpoint_io)


class _Checked(CheckpointIO):
    """Another reader and writer of checkpoints, wrapped in :func:`check_checkpoint`."""

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        check_checkpoint(path)
        options = {} if map_location is None else {"map_location": map_location}
        return self.inner.load_checkpoint(path, weights_only=weights_only, **options)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()
