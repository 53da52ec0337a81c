"""The training of an EAGLE-style head as a LightningModule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import AdamW

from fsd_core.errors import DataError
from fsd_core.tensors import to_device
from fsd_core.text.encoding import special_ids
from fsd_infer.drafters import EagleDrafter, TreeShape
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_train.data.packs import on_host
from fsd_train.losses import DraftBatch, LMHead, has_feature_term
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.head_options import HeadOptions
from fsd_train.models.start import choose_draft_ids, continue_from, initialise_from, set_draft_vocabulary
from fsd_train.models.unroll import ChainPlan, plan_chains, unroll
from fsd_train.models.work import Operations, head_operations
from fsd_train.packed import TextMask
from fsd_train.types import NonNegativeFloat, PositiveInt, Share

DEFAULT_HEAD = HeadOptions()
_CONTEXT_BLOCK = 512  # added prompt ids are padded to a multiple, to limit the number of distinct shapes


class EagleModule(DistillationModule):
    """Trains a draft head on the features of a frozen target.

    Args:
        target: built-in name, directory or hub id.
        head: options of the head.
        initial_head: directory or hub id of an exported head to start from. Modules that it lacks start with zero
            output. The draft vocabulary is chosen again.
        draft_vocab_size: size Vd of the draft vocabulary: the most frequent ids of the training answers and the
            target's end-of-sequence ids. None: the whole vocabulary.
        context_ids: add the ids of a batch's prompts to a reduced draft vocabulary, as decoding does
            (:class:`fsd_infer.drafters.vocabulary.ContextVocabulary`).
        chain_share: share of the batch's chains, drawn per batch, that run beyond step 0, in (0, 1]. Unbiased.
        noise: half-width of uniform noise on input features, in the scaled space if the head has a feature_scale.
            Must be 0 for layout "eagle3", which does not read final features.
        optimizer: optimizer of the weights; vectors (norms, biases) get no weight decay.
        training: further options of :class:`fsd_train.models.distillation.DistillationModule`.
    """

    head: EagleHead
    of_weights = ("head", "draft_vocab_size")

    def __init__(
        self,
        target: str,
        head: HeadOptions = DEFAULT_HEAD,
        initial_head: str | None = None,
        draft_vocab_size: PositiveInt | None = None,
        context_ids: bool = False,
        chain_share: Share = 1.0,
        noise: NonNegativeFloat = 0.0,
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=1e-3, weight_decay=0.0),
        **training: Any,
    ) -> None:
        super().__init__(target, optimizer=optimizer, **training)
        self.head_options = head
        self.initial_head, self.draft_vocab_size, self.context_ids = initial_head, draft_vocab_size, context_ids
        self.chain_share, self.noise = chain_share, noise
        self.save_hyperparameters()
        self._draft_ids_on_host: Tensor | None = None

    # setting up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the target and build the head (idempotent)."""
        if hasattr(self, "head"):
            return
        target = self.target
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            config = self.head_options.config(target, self.draft_vocab_size)
            self._check(config)
            head = EagleHead(config).float()
            initialise_from(head, target)
            # not in setup(), because an averaging callback copies the module before it
            if self._in_training:
                counts = None if head.draft_ids is None else self._answer_counts("draft_vocab_size")
                ids = None if counts is None else choose_draft_ids(counts, len(head.draft_ids), self.always_drafted())
                set_draft_vocabulary(head, ids, target)
            self.head = head
            if self.initial_head:
                self._continue(self.initial_head)

    def _uncompilable(self) -> str | None:
        if self.chain_share < 1:  # padding to all chains would undo its gain
            return f"model.chain_share is {self.chain_share:g}, which leaves out rows of most positions: set it to 1"
        if self.context_ids:
            return "model.context_ids changes the draft vocabulary with every batch: set it to false"
        return super()._uncompilable()

    def _check(self, config: EagleConfig) -> None:
        """Raise DataError if a training option does not apply to a head of this layout."""
        if config.layout != "eagle3":
            return
        if self.noise:
            raise DataError(f"noise is {self.noise}, but a head of layout eagle3 reads no final features. Set it to 0.")
        if config.own_lm_head and self.context_ids:
            raise DataError("context_ids needs the target's LM head. Set head.own_lm_head or context_ids to false.")
        if config.own_lm_head and has_feature_term(self.loss):
            raise DataError(
                "a head of layout eagle3 with its own LM head estimates no features. Set the loss's w_feature to 0, or "
                "head.own_lm_head to false."
            )
        if config.own_lm_head and self.reference is not None:
            raise DataError("adaspec compares heads by the target's LM head. Set head.own_lm_head to false.")

    def _continue(self, head: str) -> None:
        """Copy the weights of an earlier head, and in validation its draft vocabulary."""
        initial = EagleHead.from_pretrained(head, self.target, dtype=torch.float32)
        continue_from(self.head, initial)
        source, ids = initial.draft_ids, self.head.draft_ids
        if not self._in_training and source is not None and ids is not None and source.shape == ids.shape:
            ids.copy_(source)

    def always_drafted(self) -> list[int]:
        """Return the ids that end an answer or a turn: end-of-sequence ids and the tokenizer's special tokens."""
        target = self.target
        special = set() if target.tokenizer is None else special_ids(target.tokenizer)
        return sorted(i for i in {*target.eos_token_ids, *special} if i < target.vocab_size)

    def new_head(self) -> EagleHead:
        return EagleHead(self.head.config)

    @property
    def tables(self) -> list[Tensor]:
        return [] if self.head.lm_head is None else [self.head.lm_head.weight]

    def _load_target(self) -> Target:
        target = super()._load_target()
        self._capture_layers(target, self.head_options.capture_layers(target))
        return target

    # steps ---------------------------------------------------------------------------------------------------------

    def draft(self, batch: dict[str, Any], steps: int) -> DraftBatch:
        """Run the head over a batch and return the supervised rows."""
        head, share, generator = self.head, 1.0, None
        if self.training and self.chain_share < 1.0:
            share, generator = self.chain_share, self._generator()
        plan = plan_chains(
            on_host(batch, "loss_mask")[0], steps, self.step_decay, share, generator,
            supervised_rows=batch.get("supervised") if self.training else None, static_shapes=self.is_compiled,
        )  # fmt: skip
        rows = plan.rows.to(self.device)
        features, mask = self._target_features(batch)  # [1, M, F]
        inputs = self._inputs(head, features)  # [1, M, F']
        with torch.no_grad():  # x_{i+1} at position i: [1, M, E]; at the last position it is never read
            embeds = self.target.embed(batch["input_ids"].roll(-1, 1)).to(inputs.dtype)
        noisy = inputs + self._draw_noise(inputs) if self.noise and self.training else inputs
        final = features[0, :, : head.config.target_hidden_size]  # [M, H]
        lm_head = head.lm_head
        needs_reference = self.training and self.reference is not None
        return DraftBatch(
            estimates=self._estimates(head, embeds, noisy, mask, plan),  # [R, H]
            features=final.index_select(0, rows.position + 1).to(inputs.dtype),  # [N, H] f_{i+1}, see unroll
            rows=rows,
            target_lm_head=self._lm_head_of(batch) if self.context_ids else self.lm_head(),
            feature_scale=head.feature_scale,
            own_lm_head=None if lm_head is None else LMHead(lm_head.weight.to(self.target.dtype), ids=head.draft_ids),
            reference=self._reference_estimates(embeds, features, mask, plan) if needs_reference else None,
            compiled=self.is_compiled,
        )

    def operations(self, batch: dict[str, Any]) -> Operations:
        return head_operations(self, batch, self.unroll_steps)

    def _inputs(self, head: EagleHead, features: Tensor) -> Tensor:
        """Select the target's features [1, M, F] that a head reads, in the precision of its weights: [1, M, F']."""
        return self.target.features_of(features, head.config.fused_layers).to(self.head.fc.weight.dtype)

    def _estimates(self, head: EagleHead, embeds: Tensor, inputs: Tensor, mask: TextMask, plan: ChainPlan) -> Tensor:
        """Run the unrolled head and return the LM head's inputs at the rows of a plan, [R, H]."""
        with self._running_compiled(head.layers):
            by_step = unroll(head, embeds, inputs, mask, len(plan.rows.chains), plan.roots)
        outputs = torch.cat(by_step, dim=1)[0]  # [M + (S-1)·K, H]
        return head.readout(outputs.index_select(0, to_device(plan.output, self.device)))

    def _draw_noise(self, inputs: Tensor) -> Tensor:
        """Draw noise for the final features among inputs [1, M, F'], 0 for the inner layers' features.

        In later steps the head's outputs replace the final features.
        """
        size, scale = self.head.config.target_hidden_size, self.head.feature_scale
        shape, generator = (*inputs.shape[:-1], size), self._generator(self.device)
        noise = torch.rand(shape, generator=generator, device=self.device)  # [1, M, H]
        noise = noise * (2 * self.noise) - self.noise
        noise = noise if scale is None else noise * scale
        return torch.nn.functional.pad(noise, (0, inputs.shape[-1] - size))

    def _lm_head_of(self, batch: dict[str, Any]) -> LMHead:
        """Return the LM head over the draft vocabulary and the ids of the batch's prompts."""
        head = self.lm_head()
        if self.head.draft_ids is None:
            return head
        if self._draft_ids_on_host is None:
            self._draft_ids_on_host = self.head.draft_ids.cpu()
        in_prompts = torch.zeros(self.target.vocab_size, dtype=torch.bool)
        in_prompts[on_host(batch, "input_ids")[~on_host(batch, "loss_mask").bool()]] = True
        is_undrafted = torch.ones_like(in_prompts)
        is_undrafted[self._draft_ids_on_host] = False
        added = (in_prompts & is_undrafted).nonzero().squeeze(1)
        padding = (~in_prompts & is_undrafted).nonzero().squeeze(1)[: -len(added) % _CONTEXT_BLOCK]
        added = torch.cat([added, padding])
        return head.joined(LMHead.of(self.target, to_device(added, self.device))) if len(added) else head

    @torch.no_grad()
    def _reference_estimates(self, embeds: Tensor, features: Tensor, mask: TextMask, plan: ChainPlan) -> Tensor:
        """Return the reference head's estimates [R, H], on features without noise."""
        if self._frozen.reference is None:
            self._frozen.reference = self._load_reference()
        head = self._frozen.reference.to(self.device)
        return self._estimates(head, embeds, self._inputs(head, features), mask, plan)

    def _load_reference(self) -> EagleHead:
        """Load the loss's reference head. Raises DataError for one that cannot be compared with the trained head."""
        directory = self.reference
        assert directory is not None
        reference = EagleHead.from_pretrained(directory, self.target, dtype=torch.float32).requires_grad_(False)
        if reference.lm_head is not None:
            raise DataError(f"the reference head {directory} has its own LM head. Use one without.")
        if missing := sorted(set(reference.config.fused_layers) - set(self.target.captured_layers)):
            raise DataError(
                f"the reference head {directory} reads inner layers {missing}, which the trained head does not. "
                "Add them to head.fused_layers, or use another reference."
            )
        return reference

    def make_drafter(self, target: Target, tree: TreeShape | None = None) -> EagleDrafter:
        return EagleDrafter(copy.deepcopy(self.head).requires_grad_(False), target, tree)

    # checkpoints ---------------------------------------------------------------------------------------------------

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write the head for :meth:`EagleHead.from_pretrained`."""
        self.head.config.training = self.record(extra)
        self.head.save_pretrained(directory, torch.bfloat16)
        return Path(directory)
