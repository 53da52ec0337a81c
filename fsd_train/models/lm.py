"""Distillation of an independent small causal LM towards the target, on fixed answers or on its own (DistillSpec).

DistillSpec (Zhou et al., arXiv 2310.08461) trains the drafter on answers that it sampled itself, since those are the
contexts it drafts in. With probability ``on_policy`` a batch keeps its prompts and gets new answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW

from fsd_infer.device.transfer import to_device
from fsd_infer.drafters import LMDrafter, TreeShape
from fsd_infer.drafters.lm import check_same_vocabulary, load_lm
from fsd_infer.errors import DataError
from fsd_infer.targets.target import Target
from fsd_train.data.batches import keep_on_host, on_host
from fsd_train.losses import DraftBatch, Loss, has_feature_term, reference_of
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.small_lm import LogitsHead, SmallLM
from fsd_train.models.unroll import plan_positions
from fsd_train.models.vocabulary import choose_draft_ids
from fsd_train.types import PositiveFloat, PositiveInt, ShareOrNone


class LMModule(DistillationModule):
    """Distils a small causal LM of the target's vocabulary towards the target.

    Batches, schedule, resumption and metrics are those of heads. The rows of a batch are the contexts in which decoding
    drafts: from the first answer token on, each next token of the answer.

    Memory beyond that of the model: its logits at the supervised tokens and their gradient, 2·N·V values in the
    training precision (N answer tokens of a batch; ``data.batch_tokens`` bounds N), and with ``adaspec`` as many again
    and the reference's. The target's logits are computed in chunks by the loss.

    Args:
        target: built-in name, directory or hub id of the target.
        drafter: the same of the small model that training starts from.
        lora: train a LoRA adapter with these options of ``peft.LoraConfig`` ({} for the defaults: r 16, alpha 32, all
            linear layers); None trains all weights.
        on_policy: probability λ that a batch's answers are sampled from the drafter itself. Above 0 the target runs in
            those steps, so it is loaded with all its layers even where features are cached.
        on_policy_tokens: longest such answer.
        on_policy_temperature: of the sampling.
        loss: as for EagleModule, without the feature term (a small LM has features of its own). The reference of
            ``adaspec`` is a small LM too: its directory, a hub id, or a peft adapter. A draft's distribution does not
            depend on the step, since the model reads the text itself: only losses that couple steps (``fsd``) gain by
            ``unroll_steps`` above 1.
        loss_vocab_size: how many tokens the loss looks at: the most frequent ones of the training answers, p and q
            renormalised within them. Most of a step's time goes by vocabulary. The model keeps and drafts all tokens.
        optimizer: of the weights; vectors (norms, biases) get no weight decay.
        training: the other options of :class:`fsd_train.models.distillation.DistillationModule`.
    """

    head: SmallLM
    steps_differ = False

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
        if has_feature_term(self.loss):
            raise DataError(
                "a small LM has features of its own, which cannot match the target's: set w_feature to 0 in the loss's "
                "init_args (what is left of eagle is then its cross-entropy, whose gradient is that of kl_pq)."
            )
        self.save_hyperparameters()

    # setting up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load target and drafter (idempotent)."""
        if hasattr(self, "head"):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)  # of fresh adapters
            self.head = self.new_head()
        if self.loss_vocab_size is not None:
            self.head.draft_ids = self._loss_ids(self.loss_vocab_size).to(self.device)

    def _loss_ids(self, size: int) -> Tensor:
        """The most frequent ids of the answers. Raises DataError where they cannot be counted or used."""
        data = self._datamodule
        if not hasattr(data, "answer_counts"):
            raise DataError("loss_vocab_size needs a data module with answer_counts() to choose the ids by; unset it.")
        if self.lora is not None or "FSDP" in type(self.trainer.strategy).__name__:
            raise DataError(
                "loss_vocab_size reads rows of the drafter's LM head, so it goes with neither lora nor fsdp."
            )
        if size == self.target.hidden_size:
            raise DataError(f"loss_vocab_size must differ from the target's hidden size, {size}.")
        counts = data.answer_counts(self.target.vocab_size)[: self.head.common]
        return choose_draft_ids(counts, size, [i for i in self.target.eos_token_ids if i < len(counts)])

    def setup(self, stage: str) -> None:
        """As for every drafter. Raises DataError if the rows hold ids that the drafter's embedding lacks."""
        callbacks: Any = [] if self._attached is None else self.trainer.callbacks  # type: ignore[attr-defined]
        if self.lora is not None and any(isinstance(callback, WeightAveraging) for callback in callbacks):
            raise DataError("weights are averaged as a whole: leave that callback out with lora.")
        super().setup(stage)
        embedded = int(self.head.causal_lm.get_input_embeddings().weight.shape[0])
        data = self._datamodule
        for rows in (data.train_set, data.validation_set) if hasattr(data, "check_ids") else ():
            token, where = rows.highest
            if token >= embedded:
                raise DataError(
                    f"{where}: token id {token} is beyond the embedding of drafter {self.head.name} ({embedded} rows): "
                    "use a drafter with the target's whole vocabulary, or resize its embedding."
                )

    def new_head(self) -> SmallLM:
        return SmallLM(self.drafter, self.target, self.lora)

    @property
    def tables(self) -> list[Tensor]:
        """Embeddings and LM head."""
        model = self.head.causal_lm
        return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]

    @property
    def _runs_target(self) -> bool:
        """Whatever is cached, the target runs where answers are sampled."""
        return super()._runs_target or (self._attached is not None and self.on_policy > 0)

    def _new_lm_head(self) -> LogitsHead:
        """It passes the drafter's logits through."""
        head = super()._new_lm_head()
        return LogitsHead(head.weight, head.bias, head.scale, head.cap, head.ids)

    # steps ---------------------------------------------------------------------------------------------------------

    def draft(self, batch: dict[str, Any], steps: int) -> DraftBatch | None:
        """The drafter's logits beside the target's features at the supervised rows; None if there are none."""
        plan = plan_positions(on_host(batch, "loss_mask"), steps, self.step_decay)
        features = self._features(batch, plan)
        if features is None:
            return None
        rows, ids = plan.rows.to(self.device), batch["input_ids"]
        # position i+1 of either model predicts token i+2, so both rows stand one further than a head's input
        return DraftBatch(
            estimates=self.head(ids, rows.position),
            features=features[:, 1:, : self.target.hidden_size].flatten(0, 1).index_select(0, rows.position),
            rows=rows,
            head=self.lm_head(),
            reference=self._reference_logits(ids, rows.position),
        )

    @torch.no_grad()
    def _reference_logits(self, ids: Tensor, rows: Tensor) -> Tensor | None:
        """[N, Vd], the logits of the loss's reference where the drafter's are; None where it is not wanted.

        Not wanted in validation. Loaded when first asked for, in the target's dtype and on its device.
        """
        directory = reference_of(self.loss)
        if directory is None or not self.training:
            return None
        if self._frozen.reference is None:
            reference = load_lm(directory, self.target)
            check_same_vocabulary(reference, self.target)
            if reference.vocab_size < self.head.common:
                raise DataError(
                    f"the reference {directory} has logits for {reference.vocab_size} tokens, the drafter for "
                    f"{self.head.common}: use a reference that knows them all."
                )
            reference.check_lm_head()
            self._frozen.reference = reference
        reference = self._frozen.reference
        logits = reference.lm_logits(reference.features(ids)[:, 1:].flatten(0, 1)[rows])
        kept = self.head.draft_ids
        return logits[..., : self.head.common] if kept is None else logits[..., kept]

    def _idle(self, steps: int) -> Tensor:
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        return self.head(ids, ids[0, :1]).sum() * 0.0

    def training_drafts(self, batch: dict[str, Any], steps: int) -> DraftBatch | None:
        return self.draft(self.maybe_on_policy(batch), steps)

    def maybe_on_policy(self, batch: dict[str, Any]) -> dict[str, Any]:
        """With probability ``on_policy`` the batch with answers of the drafter's own, else the batch.

        Chance and draws depend on seed, rank and batch number only, so that a resumed run samples the same.
        """
        share = self.on_policy
        if not share:
            return batch
        seed = self.seed * 1_000_003 + self._batch_number
        # the same on all ranks: one that samples would keep the others waiting
        if float(torch.rand((), generator=torch.Generator().manual_seed(seed))) >= share:
            return batch
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed * 4096 + self.global_rank)
            return self.on_policy_batch(batch)

    def on_policy_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch's conversations up to their last answer, and the drafter's own answer in place of that one.

        Returns:
            a batch like the given one, without features; ``loss_mask`` is 1 on the sampled tokens alone.
        """
        ids, mask = on_host(batch, "input_ids"), on_host(batch, "loss_mask").bool()
        prompts = [row[: _last_answer(answer)] for row, answer in zip(ids, mask, strict=True)]
        limit = self.on_policy_tokens
        room = [getattr(model, "max_positions", None) for model in (self.target, self.head)]
        limit = min([limit, *(most - max(map(len, prompts)) for most in room if most is not None)])
        if limit < 1:
            return batch
        answers = self.head.sample(prompts, limit, self.on_policy_temperature, self.target.eos_token_ids)
        texts = [torch.cat(parts) for parts in zip(prompts, answers, strict=True)]
        masks = [(torch.arange(len(text)) >= len(prompt)).long() for prompt, text in zip(prompts, texts, strict=True)]
        pairs = {"input_ids": texts, "loss_mask": masks}
        fresh = {name: pad_sequence(rows, batch_first=True) for name, rows in pairs.items()}
        kept = {name: value for name, value in batch.items() if name == "ids" or name == "index"}
        placed = {name: to_device(value, self.device) for name, value in fresh.items()}
        return {**keep_on_host({**kept, **fresh}), **placed}

    # checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained: all weights, or the adapter's alone."""
        state = super().state_dict(*args, **kwargs)
        if not hasattr(self, "head") or not hasattr(self.head.model, "peft_config"):
            return state
        trained = {f"head.{name}" for name in self.head.trained()}
        return {name: value for name, value in state.items() if name in trained}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what :meth:`state_dict` gives; ``strict`` means all of that and nothing else."""
        wrong = sorted(set(self.state_dict()) ^ set(state_dict))
        if strict and wrong:
            raise RuntimeError(f"the state has {len(wrong)} tensors too many or too few, first {wrong[0]!r}.")
        return super().load_state_dict(state_dict, strict=False, assign=assign)

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write what ``fsd_infer`` loads as a drafter, with a record of the training in training.json.

        See :meth:`fsd_train.models.small_lm.SmallLM.export`.
        """
        record = self.record({"target": self.target.fingerprint(), **(extra or {})})
        return self.head.export(Path(directory), record)

    def make_drafter(self, target: Target, tree: TreeShape | None = None) -> LMDrafter:
        """The drafter as it is now, as a copy in the target's dtype, adapters merged."""
        model = self.head.merged(target.dtype).to(target.device)
        return LMDrafter(Target(model, self.head.tokenizer, self.head.name), target, tree)


def _last_answer(mask: Tensor) -> int:
    """Where the last run of ones in mask [M] begins; at least 1, so that there is a prompt."""
    ends = mask.nonzero()
    if not len(ends):
        return max(len(mask), 1)
    end = int(ends[-1])
    before = (~mask[:end]).nonzero()
    return max(int(before[-1]) + 1 if len(before) else 0, 1)
