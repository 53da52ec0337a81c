"""Fine-tuning a target on answers: cross-entropy of the answer tokens, all weights or a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.errors import DataError
from fsd_train.data import on_host
from fsd_train.metrics import StepMean
from fsd_train.options import ScheduleOptions
from fsd_train.safety import check_state
from fsd_train.small_lm import SmallLM, SmallLMModule


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of tokens [N] under logits [N, V], in nats, computed in float32: [N]."""
    return torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none")


class FinetuneModule(SmallLMModule):
    """Trains a causal LM to give the answers of the data, from its own weights on.

    Batches are those of :class:`fsd_train.data.AnswersDataModule`. With ``lora`` the base model is frozen, in bf16
    where the trainer's precision is a bf16 one, and the adapter in fp32.

    Args:
        target: built-in name, directory or hub id of the model to start from.
        lora: options of ``peft.LoraConfig`` ({} for r 16, alpha 32, all linear layers); None trains all weights.
        initial_adapter: directory of an exported adapter of the same rank to start from, with ``lora`` only.
        lr: peak learning rate.
        compile: run each decoder layer and the loss through torch.compile, in any shape. On a CPU it needs a C++
            compiler, and attention is the plain one: the fused one's backward pass is slower there.
        schedule: the other options of :class:`fsd_train.options.ScheduleOptions`; optimizer muon with ``lora`` only.
    """

    def __init__(
        self,
        target: str,
        lora: dict[str, Any] | None = None,
        initial_adapter: str | None = None,
        lr: float = 1e-3,
        compile: bool = False,
        **schedule: Any,
    ) -> None:
        super().__init__(ScheduleOptions(target=target, lr=lr, **schedule))
        self.check_optimizer(lora)
        if initial_adapter is not None and lora is None:
            raise DataError("initial_adapter is a start for lora: set model.lora, or leave it out.")
        self.val_loss = StepMean(1)
        self._token_losses = token_losses
        self.save_hyperparameters()

    def configure_model(self) -> None:
        """Load the model (idempotent)."""
        if hasattr(self, "head"):
            return
        lora = self.hparams["lora"]
        dtype = torch.bfloat16 if self._half and lora is not None else torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            self.head = SmallLM(self.options.target, None, lora, dtype)
        if self.hparams["initial_adapter"] is not None:
            self.head.load_adapter(self.hparams["initial_adapter"])
        if self.hparams["compile"]:
            self.head.compile_layers()
            self._token_losses = torch.compile(token_losses, dynamic=True)

    def setup(self, stage: str) -> None:
        """Make the model. Raises DataError if the data has token ids that the target lacks."""
        self.configure_model()
        if hasattr(self._datamodule, "check_ids"):
            self._datamodule.check_ids(self.head.vocab_size)

    def losses(self, batch: dict[str, Any]) -> Tensor:
        """Cross-entropy of each answer token of a batch, in nats: [N] for N tokens under the loss mask."""
        ids = batch["input_ids"]
        wanted = to_device(on_host(batch, "loss_mask")[:, 1:].flatten().nonzero()[:, 0], ids.device)
        hidden = self.head.hidden(ids)[:, :-1].flatten(0, 1)[wanted]
        tokens = ids[:, 1:].flatten()[wanted]
        return self._token_losses(self.head.logits(hidden), tokens)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        self.log("loss", loss, prog_bar=True, sync_dist=True)  # the mean over all devices
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        losses = self.losses(batch)
        self.val_loss.update(losses[None], torch.ones_like(losses)[None])

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.val_loss.compute().float(), prog_bar=True)
        self.val_loss.reset()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_state(self, checkpoint)
        super().on_load_checkpoint(checkpoint)

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write what ``fsd_infer`` loads as a target, with a record of the training in training.json."""
        return self.head.export(Path(directory), self.record(extra))
