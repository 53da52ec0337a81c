"""Distillation of an independent small causal LM towards the target, on fixed answers or its own samples.

DistillSpec (Zhou et al., arXiv 2310.08461) trains the drafter on its own samples, because these are the contexts in
which it drafts. With probability ``on_policy`` a batch keeps its prompts and gets new answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import AdamW

from fsd_core.errors import DataError
from fsd_core.tensors import to_device
from fsd_infer.drafters import LMDrafter, TreeShape
from fsd_infer.drafters.lm import check_same_vocabulary, load_lm
from fsd_infer.targets.target import Target
from fsd_train.checkpoints import callbacks_of
from fsd_train.data.packs import collate, keep_on_host, on_host
from fsd_train.losses import DraftBatch, Loss, has_feature_term
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.small_lm import LogitsHead, SmallLM
from fsd_train.models.start import choose_draft_ids
from fsd_train.models.unroll import plan_positions
from fsd_train.models.work import Operations, lm_operations
from fsd_train.packed import TextMask, forward_packed, supports_packing
from fsd_train.types import PositiveFloat, PositiveInt, ShareOrNone


class LMModule(DistillationModule):
    """LightningModule that distils a small causal LM with the target's vocabulary.

    Batches, schedule, resumption and metrics are those of heads. The rows of a batch are the contexts in which decoding
    drafts: every answer token from the second on.

    Memory beyond the model's: logits at the supervised tokens and their gradient, 2·N·V values in the training
    precision for N answer tokens in a batch. ``adaspec`` doubles this and adds the reference's logits.

    Args:
        target: built-in name, directory or hub id of the target.
        drafter: built-in name, directory or hub id of the small LM to start from, or "self:layers=0-4,25-29": a copy of
            the target with these layers only.
        lora: options of ``peft.LoraConfig`` for training a LoRA adapter ({}: r 16, alpha 32, all linear layers). None:
            train all weights.
        on_policy: probability λ that a batch's answers are sampled from the drafter. Above 0 the target is loaded with
            its layers even with cached features.
        on_policy_tokens: most tokens of a sampled answer.
        on_policy_temperature: temperature of the samples.
        loss: a loss without a feature term, because a small LM has other features. ``adaspec`` takes a small LM as
            reference: directory, hub id or peft adapter. Only losses that couple steps (``fsd``) take more than one of
            them (``unroll_steps``), and need it, because a draft's distribution does not depend on the step.
        loss_vocab_size: number of tokens in the loss: the most frequent ones of the training answers, within which p
            and q are renormalised. It shortens a step. The model keeps and drafts all tokens.
        optimizer: optimizer of the weights; vectors (norms, biases) get no weight decay.
        training: further options of :class:`fsd_train.models.distillation.DistillationModule`.
    """

    head: SmallLM
    of_weights = ("drafter", "lora")
    steps_differ = reads_images = False

    def __init__(
        self,
        target: str,
        drafter: str,
        lora: dict[str, Any] | None = None,
        on_policy: ShareOrNone = 0.0,
        on_policy_tokens: PositiveInt = 128,
        on_policy_temperature: PositiveFloat = 1.0,
        loss: Loss | str = "kl_pq",
        loss_vocab_size: PositiveInt | None = None,
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=1e-4, weight_decay=0.0),
        **training: Any,
    ) -> None:
        super().__init__(target, loss, optimizer=optimizer, **training)
        self.drafter, self.lora, self.loss_vocab_size = drafter, lora, loss_vocab_size
        self.on_policy, self.on_policy_tokens = on_policy, on_policy_tokens
        self.on_policy_temperature = on_policy_temperature
        if self.loss.couples_rows and self.unroll_steps == 1:
            raise DataError(
                "the loss is of chains of drafts, and with unroll_steps 1 each is one draft. Set model.unroll_steps to "
                "2 to 7."
            )
        if has_feature_term(self.loss):
            raise DataError(
                "a small LM's features cannot match the target's. Set w_feature to 0 in the loss's init_args: eagle is "
                "then a cross-entropy with the gradient of kl_pq."
            )
        self.save_hyperparameters()

    # setting up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load target and drafter (idempotent)."""
        if hasattr(self, "head"):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # for new adapters
            self.head = self.new_head()
        if self.loss_vocab_size is not None:
            self.head.draft_ids = self._loss_ids(self.loss_vocab_size).to(self.device)

    def _loss_ids(self, size: int) -> Tensor:
        """Return the most frequent ids of the answers. Raises DataError if they cannot be counted or used."""
        counts = self._answer_counts("loss_vocab_size")[: self.head.common]
        if self.lora is not None or "FSDP" in type(self.trainer.strategy).__name__:
            raise DataError(
                "loss_vocab_size reads rows of the drafter's LM head, so it excludes lora and fsdp. Unset it or these."
            )
        if size == self.target.hidden_size:
            raise DataError(f"loss_vocab_size is {size}, the target's hidden size. Choose another number.")
        return choose_draft_ids(counts, size, [i for i in self.target.eos_token_ids if i < len(counts)])

    def setup(self, stage: str) -> None:
        """Build the model. Raises DataError if the rows hold ids that the drafter's embedding lacks."""
        if self.lora is not None and self._trainer_or_none and callbacks_of(self._trainer_or_none, WeightAveraging):
            raise DataError("weight averaging does not support lora. Omit the callback or model.lora.")
        if self.on_policy and getattr(self._datamodule, "record_features", None) is not None:
            raise DataError("record_features keeps features of fixed answers, but on_policy samples others. Unset one.")
        super().setup(stage)
        embedded = int(self.head.causal_lm.get_input_embeddings().weight.shape[0])
        data = self._datamodule
        for rows in (data.train_set, data.validation_set) if hasattr(data, "check") else ():
            rows.check_lengths(self.head.fixed_positions)
            token, where = rows.max_id
            if token >= embedded:
                raise DataError(
                    f"{where}: token id {token} is beyond the embedding of drafter {self.head.name} ({embedded} rows). "
                    "Use a drafter with the target's whole vocabulary, or resize its embedding."
                )

    def new_head(self) -> SmallLM:
        return SmallLM(self.drafter, self.target, self.lora, self.whole_target)

    @property
    def tables(self) -> list[Tensor]:
        """Embeddings and LM head."""
        model = self.head.causal_lm
        return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]

    @property
    def _runs_target(self) -> bool:
        """Whether training needs the target's layers: also if answers are sampled, even with cached features."""
        return super()._runs_target or (self._trainer_or_none is not None and self.on_policy > 0)

    def _new_lm_head(self) -> LogitsHead:
        """Return an LM head that passes the drafter's logits through."""
        head = super()._new_lm_head()
        return LogitsHead(head.weight, head.bias, head.scale, head.cap, head.ids)

    # steps ---------------------------------------------------------------------------------------------------------

    def draft(self, batch: dict[str, Any], steps: int) -> DraftBatch:
        """Return the drafter's logits and the target's features at the supervised rows."""
        if self.training:
            batch = self.maybe_on_policy(batch)
        rows = plan_positions(
            on_host(batch, "loss_mask")[0], steps, self.step_decay,
            supervised_rows=batch.get("supervised") if self.training else None, static_shapes=self.is_compiled,
        ).to(self.device)  # fmt: skip
        head, ids, (features, mask) = self.head, batch["input_ids"], self._target_features(batch)
        final = features[0, :, : self.target.hidden_size]  # [M, H]
        positions = rows.position + 1  # either model predicts token i+2 there: one position after a head's input
        needs_reference = self.training and self.reference is not None
        with self._running_compiled(head.layers if supports_packing(head.hidden, head.causal_lm) else ()):
            logits = head(ids, mask, positions)  # [N, Vd]
        return DraftBatch(
            estimates=logits,
            features=final.index_select(0, positions),  # [N, H]
            rows=rows,
            target_lm_head=self.lm_head(),
            reference=self._reference_logits(ids, mask, positions) if needs_reference else None,
            compiled=self.is_compiled,
        )

    def operations(self, batch: dict[str, Any]) -> Operations:
        return lm_operations(self, batch)

    @torch.no_grad()
    def _reference_logits(self, ids: Tensor, mask: TextMask, positions: Tensor) -> Tensor:
        """Return the reference's logits [N, Vd] at positions [N]."""
        if self._frozen.reference is None:
            self._frozen.reference = self._load_reference()
        reference, draft_ids = self._frozen.reference, self.head.draft_ids
        features = forward_packed(reference.features, reference.model, ids, mask)[0]  # [M, H']
        logits = reference.lm_logits(features.index_select(0, positions))  # [N, V']
        return logits[..., : self.head.common] if draft_ids is None else logits[..., draft_ids]

    def _load_reference(self) -> Target:
        """Load the loss's reference. Raises DataError if it lacks tokens of the drafter."""
        directory = self.reference
        assert directory is not None
        reference = load_lm(directory, self.target)
        check_same_vocabulary(reference, self.target)
        if reference.vocab_size < self.head.common:
            raise DataError(
                f"the reference {directory} has logits for {reference.vocab_size} tokens, the drafter for "
                f"{self.head.common}. Use a reference with the whole vocabulary."
            )
        reference.check_lm_head()
        return reference

    def maybe_on_policy(self, batch: dict[str, Any]) -> dict[str, Any]:
        """With probability ``on_policy`` replace the answers of a batch by samples of the drafter.

        The decision and the samples depend only on seed, rank and batch number, so that a resumed run draws the same.
        """
        if not self.on_policy:
            return batch
        # the same decision on all ranks, so that none waits for another's samples
        seed = self.seed * 1_000_003 + self._batch_number
        if float(torch.rand((), generator=torch.Generator().manual_seed(seed))) >= self.on_policy:
            return batch
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._draw_seed(self._batch_number))
            return self.on_policy_batch(batch)

    def on_policy_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Replace the last answer of each conversation by a sample of the drafter.

        Returns:
            A batch without features, whose ``loss_mask`` is 1 only on sampled tokens.
        """
        texts, masks = (on_host(batch, name)[0].split(batch["lengths"].tolist()) for name in ("input_ids", "loss_mask"))
        count = len(batch["ids"])  # without the padding
        prompts = [text[: _last_answer(mask.bool())] for text, mask in zip(texts[:count], masks[:count], strict=True)]
        contexts = [getattr(model, "fixed_positions", None) for model in (self.target, self.head)]
        room = [context - max(map(len, prompts)) for context in contexts if context is not None]
        max_new_tokens = min([self.on_policy_tokens, *room])
        if max_new_tokens < 1:
            return batch
        answers = self.head.sample(prompts, max_new_tokens, self.on_policy_temperature, self.target.eos_token_ids)
        items = [
            {"id": name, "input_ids": torch.cat([prompt, answer]),
             "loss_mask": (torch.arange(len(prompt) + len(answer)) >= len(prompt)).long()}
            for name, prompt, answer in zip(batch["ids"], prompts, answers, strict=True)
        ]  # fmt: skip
        sampled = keep_on_host(collate(items, len(on_host(batch, "input_ids")[0])))
        return {**sampled, **{name: to_device(sampled[name], self.device) for name in ("input_ids", "loss_mask")}}

    # checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the trained weights: all, or only the adapter's."""
        state = super().state_dict(*args, **kwargs)
        if not hasattr(self, "head") or not hasattr(self.head.model, "peft_config"):
            return state
        trained = {f"head.{name}" for name in self.head.trained()}
        return {name: value for name, value in state.items() if name in trained}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the result of :meth:`state_dict`; ``strict`` requires exactly its tensors."""
        wrong = sorted(set(self.state_dict()) ^ set(state_dict))
        if strict and wrong:
            raise RuntimeError(f"the state has {len(wrong)} extra or missing tensors, first {wrong[0]!r}.")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write a drafter for ``fsd_infer`` by :meth:`fsd_train.models.small_lm.SmallLM.export`."""
        record = self.record({"target": self.target.fingerprint(), **(extra or {})})
        return self.head.export(Path(directory), record)

    def make_drafter(self, target: Target, tree: TreeShape | None = None) -> LMDrafter:
        model = self.head.merged(target.dtype).to(target.device)
        return LMDrafter(Target(model, self.head.tokenizer, self.head.name), target, tree)


def _last_answer(mask: Tensor) -> int:
    """Return the start of the last run of ones in mask [M], at least 1, so that a prompt remains."""
    ends = mask.nonzero()
    if not len(ends):
        return max(len(mask), 1)
    end = int(ends[-1])
    before = (~mask[:end]).nonzero()
    return max(int(before[-1]) + 1 if len(before) else 0, 1)
