"""The training of a DSpark or DFlash block head (arXiv 2607.05147, 2602.06036) as a LightningModule.

Blocks with random roots run side by side. Each sees the target's features before its root and its own slots. Slot k
estimates the token k + 1 places after the root. Its Markov head reads the true token before (teacher forcing), or all
of them if it is recurrent. So slot k of a block is step k of a chain in :mod:`fsd_train.models.unroll`, and any loss
applies. The bias W2·g(W1[token]) is one product with the LM head: [z ; g(W1[token])] with [U ; W2].
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.optim import AdamW

from fsd_core.errors import DataError
from fsd_core.tensors import to_device
from fsd_infer.drafters import BlockDrafter, TreeShape
from fsd_infer.heads.block_config import BlockConfig
from fsd_infer.heads.blocks import BlockHead
from fsd_infer.heads.layers import llama_layer
from fsd_infer.heads.weights import SINGLE
from fsd_infer.targets.target import Target
from fsd_train.data.packs import on_host
from fsd_train.losses import DraftBatch, LMHead, Loss, has_feature_term
from fsd_train.losses.base import LossIndex
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.speculators import write_speculator
from fsd_train.models.start import choose_draft_ids
from fsd_train.models.unroll import supervised, totals
from fsd_train.packed import TextMask, packed_attention
from fsd_train.types import ChainSteps, NonNegativeInt, PositiveInt, Share


@dataclass(frozen=True)
class BlockOptions:
    """The shape of a block head.

    Attributes:
        num_layers: number of layers of the head.
        layers: the target's layers that it reads, from 0 (default: ``num_layers`` of them, evenly spread).
        markov: the Markov head, "none" for a DFlash head without one.
        rank: rank of the Markov head.
        confidence: whether to train a confidence head too, by which decoding ends blocks early.
        intermediate_size: width of the MLP (default: the target's).
        mask_token_id: the token that stands for those to estimate (default: the vocabulary's last).
    """

    num_layers: PositiveInt = 2
    layers: list[NonNegativeInt] = field(default_factory=list)
    markov: Literal["vanilla", "gated", "rnn", "none"] = "vanilla"
    rank: PositiveInt = 64
    confidence: bool = False
    intermediate_size: PositiveInt | None = None
    mask_token_id: NonNegativeInt | None = None

    def capture_layers(self, target: Target) -> list[int]:
        """Return the target's layers that the head reads, ascending."""
        count, depth = max(self.num_layers, 2), int(target.config.num_hidden_layers)
        spread = {min(round(1 + i * max(depth - 4, 0) / (count - 1)), depth - 1) for i in range(count)}
        return sorted(set(self.layers) or spread)

    def config(self, target: Target, block_size: int, vocabulary: int) -> BlockConfig:
        """Return the config of a new head for a target."""
        layer = {**llama_layer(target.config, target.hidden_size), "model_type": "qwen3"}
        if self.intermediate_size is not None:
            layer["intermediate_size"] = self.intermediate_size
        mask = target.vocab_size - 1 if self.mask_token_id is None else self.mask_token_id
        plain = self.markov == "none"
        confidence = None if not self.confidence else "state" if plain else "state+token"
        return BlockConfig(
            layer, self.num_layers, tuple(self.capture_layers(target)), target.hidden_size, target.vocab_size,
            block_size, mask, fills_in=False, windows=(None,) * self.num_layers, causal=(False,) * self.num_layers,
            draft_vocab_size=vocabulary, correction=None if plain else self.markov,
            rank=0 if plain else self.rank, confidence=confidence,
        )  # fmt: skip


DEFAULT_BLOCK = BlockOptions()


class BlockModule(DistillationModule):
    """Trains a DSpark head on the features of a frozen target, or a DFlash head that estimates the next tokens.

    Args:
        target: built-in name, directory or hub id.
        head: options of the head.
        block_size: tokens that a block estimates, 1 to 7.
        blocks: blocks per batch, at random roots.
        draft_vocab_size: see :class:`fsd_train.models.EagleModule`; None: the whole vocabulary.
        decay: base of the weight decay^k of slot k.
        loss: name of a registered loss without feature term, or a loss.
        optimizer: see :class:`DistillationModule`.
        training: further options of :class:`DistillationModule`, without ``unroll_steps`` and ``eval_steps``.

    Raises:
        DataError: the loss compares features, which the head does not estimate.
    """

    head: BlockHead
    head_options_class = BlockOptions
    of_weights = ("head", "draft_vocab_size", "block_size")

    def __init__(
        self,
        target: str,
        head: BlockOptions = DEFAULT_BLOCK,
        block_size: ChainSteps = 7,
        blocks: PositiveInt = 64,
        draft_vocab_size: PositiveInt | None = None,
        decay: Share = 0.8,
        loss: Loss | str = "kl_pq",
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=1e-3, weight_decay=0.0),
        **training: Any,
    ) -> None:
        super().__init__(target, loss, block_size, decay, optimizer=optimizer, eval_steps=block_size, **training)
        self.options, self.block_size, self.blocks = head, block_size, blocks
        self.draft_vocab_size = draft_vocab_size
        if has_feature_term(self.loss):
            raise DataError("a block head's states are no features. Set w_feature to 0 in the loss's init_args.")
        self.save_hyperparameters()

    # setting up ----------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Load the target and build the head (idempotent)."""
        if hasattr(self, "head"):
            return
        target, size = self.target, self.draft_vocab_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            head = BlockHead(self.options.config(target, self.block_size, size or target.vocab_size)).float()
        ids = None if size is None else torch.arange(size)
        if size is not None and self._in_training:
            ends = [i for i in target.eos_token_ids if i < target.vocab_size]
            ids = choose_draft_ids(self._answer_counts("draft_vocab_size"), size, ends)
        head.register_buffer("draft_ids", ids)
        self._initialise(head, ids)
        self.head = head

    @torch.no_grad()
    def _initialise(self, head: BlockHead, ids: Tensor | None) -> None:
        """Start with the target's LM head and final norm, and without a bias."""
        assert head.lm_head is not None
        head.lm_head.weight.copy_(self.target.lm_head_rows(ids)[0])
        final: Any = self.target.final_norm
        if getattr(final, "weight", None) is not None:
            head.norm.get_parameter("weight").copy_(final.weight)
        if head.config.correction is not None:
            head.markov_head.markov_w1.weight.normal_(std=0.02)
            head.markov_head.markov_w2.weight.zero_()

    def new_head(self) -> BlockHead:
        head = BlockHead(self.head.config)
        head.register_buffer("draft_ids", self.head.draft_ids)
        return head

    @property
    def tables(self) -> list[Tensor]:
        assert self.head.lm_head is not None
        tables: list[Tensor] = [self.head.lm_head.weight]
        if self.head.config.correction is not None:
            tables += [self.head.markov_head.markov_w1.weight, self.head.markov_head.markov_w2.weight]
        return tables

    def _load_target(self) -> Target:
        target = super()._load_target()
        self._capture_layers(target, self.options.capture_layers(target))
        return target

    # steps ---------------------------------------------------------------------------------------------------------

    def _uncompilable(self) -> str | None:
        return "the rows of a block head are not padded to static shapes"

    def draft(self, batch: dict[str, Any], steps: int) -> DraftBatch:
        """Run blocks of a batch and return the supervised rows."""
        plan = plan_blocks(
            on_host(batch, "loss_mask")[0], self.block_size, self.blocks, self.step_decay, self._generator(),
            supervised_rows=batch.get("supervised") if self.training else None,
        )  # fmt: skip
        rows = plan.rows.to(self.device)
        features, mask = self._target_features(batch)  # [1, M, F]
        hidden, previous = self._blocks(batch["input_ids"][0], features, mask, plan.roots)  # [B, K, H], [B, K]
        estimates, weight = self._with_markov(hidden, previous)  # [B, K, H + r], [Vd, H + r]
        output = to_device(plan.output, self.device)  # [R]
        final = features[0, :, : self.target.hidden_size]  # [M, H]
        confidence: Tensor | None = None
        if self.head.config.confidence is not None:
            confidence = self.head.confidence(hidden, previous).flatten().index_select(0, output)  # [R]
        return DraftBatch(
            estimates=estimates.flatten(0, 1).index_select(0, output),  # [R, H + r]
            features=final.index_select(0, rows.position + 1).to(estimates.dtype),  # [N, H] f_{i+1}, see unroll
            rows=rows,
            target_lm_head=self.lm_head(),
            own_lm_head=LMHead(weight.to(self.target.dtype), ids=self.head.draft_ids),
            confidence=confidence,
        )

    def _with_markov(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Append what the Markov head reads: the LM head's inputs [B, K, H + r], and its weight [Vd, H + r].

        Args:
            hidden: [B, K, H] of B blocks.
            previous: [B, K] the token before each estimate.
        """
        lm_head, config = self.head.lm_head, self.head.config
        assert lm_head is not None
        if config.correction is None:
            return hidden, lm_head.weight
        markov, inputs = self.head.markov_head, list[Tensor]()
        state = hidden.new_zeros(len(hidden), self.head.state_size)
        for tokens, slot in zip(previous.unbind(1), hidden.unbind(1), strict=True):  # [B], [B, H]
            read, state = markov.read(tokens, slot, state)
            inputs.append(read.to(hidden.dtype))  # [B, r]
        weight = torch.cat([lm_head.weight, markov.markov_w2.weight], 1)
        return torch.cat([hidden, torch.stack(inputs, 1)], -1), weight

    def _blocks(self, ids: Tensor, features: Tensor, mask: TextMask, host_roots: Tensor) -> tuple[Tensor, Tensor]:
        """Run the head over B blocks side by side.

        Args:
            ids: [M] of the packed sequence.
            features: [1, M, F] of the target.
            mask: its mask.
            host_roots: [B] positions of the blocks' roots, ascending, in host memory.

        Returns:
            (hidden states [B, K, H] of the blocks' slots, tokens [B, K] before each slot's estimate)
        """
        head, size, roots = self.head, self.block_size, to_device(host_roots, self.device)
        steps = torch.arange(size, device=self.device)
        positions = (roots[:, None] + steps).clamp_max(len(ids) - 1)  # [B, K]
        inner = self.target.features_of(features, head.config.layers)[..., self.target.hidden_size :]
        context = head.context(inner.to(head.fc.weight.dtype))  # [1, M, H]
        tokens = torch.full_like(positions, head.config.mask_token_id)  # [B, K]: the root, then mask tokens
        tokens[:, 0] = ids[roots]
        with torch.no_grad():
            embeds = self.target.embed(tokens).to(context.dtype)  # [B, K, E]
        rotary_positions = mask.positions[0, roots][:, None] + steps  # [B, K]
        visible = mask.blocks(host_roots, size, roots)  # of B·K queries and M + B·K keys

        def keys_values(index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            """Return a layer's keys and values of the text, then those of the blocks: [1, heads, M + B·K, D] each."""
            text = head.keys_values(index, context, mask.positions)
            return torch.cat([text[0], keys], 2), torch.cat([text[1], values], 2)

        def attend(layer: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
            return packed_attention(layer, queries, keys, values, mask)[0]

        masks = [visible] * head.config.num_layers
        embeds, rotary_positions = embeds.flatten(0, 1)[None], rotary_positions.reshape(1, -1)
        hidden = head(embeds, rotary_positions, masks, keys_values, attend)  # [1, B·K, H]
        return hidden.view(len(roots), size, -1), ids[positions]

    def make_drafter(self, target: Target, tree: TreeShape | None = None) -> BlockDrafter:
        head = copy.deepcopy(self.head).requires_grad_(False).eval()
        ids, head.draft_ids = head.draft_ids, None
        for parameter in head.parameters():  # not the rotary frequencies
            parameter.data = parameter.data.to(target.dtype)
        return BlockDrafter(head.to(target.device), target, tree, ids if ids is None else ids.to(target.device))

    # checkpoints ---------------------------------------------------------------------------------------------------

    def export(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write the head as speculators' DSpark or DFlash, with its LM head and without a copy of the embeddings."""
        head, config = self.head, self.head.config
        algorithm, architecture = ("dflash", "DFlash") if config.correction is None else ("dspark", "DSpark")
        state = {name: value.detach().cpu() for name, value in head.state_dict().items() if name != "draft_ids"}
        tensors = {name: value.to(torch.bfloat16) for name, value in state.items()}
        if head.draft_ids is not None:
            ids = head.draft_ids.cpu()
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        fields = {
            "architectures": [f"{architecture}Speculator"],
            "transformer_layer_config": {
                **config.layer, "num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size,
                "layer_types": ["full_attention"] * config.num_layers,
            },
            "draft_vocab_size": config.draft_vocab_size, "block_size": config.block_size, "sample_from_anchor": True,
            "mask_token_id": config.mask_token_id, "target_hidden_size": config.target_size,
            "aux_hidden_state_layer_ids": [number + 1 for number in config.layers], "markov_rank": config.rank,
            "markov_head_type": config.correction, "enable_confidence_head": config.confidence is not None,
            "confidence_head_with_markov": config.confidence == "state+token",
            "training": self.record(extra),
        }  # fmt: skip
        return write_speculator(directory, algorithm, fields, {SINGLE: tensors}, self.target_name, config.depth)


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of a batch, in host memory.

    Attributes:
        roots: [B] positions of their roots.
        output: [R] index of each row's slot among the blocks' B·K.
        rows: the rows.
    """

    roots: Tensor
    output: Tensor
    rows: LossIndex


def plan_blocks(
    loss_mask: Tensor,
    block_size: int,
    max_blocks: int,
    decay: float,
    generator: torch.Generator,
    supervised_rows: np.ndarray | None = None,
) -> BlockPlan:
    """Choose up to ``max_blocks`` roots at random among the supervised positions, and the rows of their slots.

    Each chosen block has the weight of the roots that it represents, so batches weigh by all of their supervised rows.

    Args:
        loss_mask: [M], as of :func:`supervised`, in host memory.
        block_size: K, slots of a block.
        max_blocks: most blocks.
        decay: base of the weight decay^k of slot k.
        generator: random generator of the choice.
        supervised_rows: see :func:`.plan_chains`.
    """
    is_supervised = supervised(loss_mask, block_size)  # [K, M]
    candidates = is_supervised[0].nonzero().squeeze(1)
    chosen = torch.randperm(len(candidates), generator=generator)[:max_blocks].sort().values
    slot_zero = candidates[chosen]  # [B] positions of slot 0
    chain_weight = len(candidates) / max(len(slot_zero), 1)
    if not len(slot_zero):  # other ranks may wait for this one's gradients
        slot_zero = torch.zeros(1, dtype=torch.long)
    slots = torch.arange(block_size)
    positions = slot_zero[:, None] + slots  # [B, K]
    length = is_supervised.shape[1]
    is_row = is_supervised[slots, positions.clamp_max(length - 1)] & (positions < length)  # [B, K]
    # the R rows, sorted by position
    block, slot = is_row.nonzero().unbind(1)
    order = positions[block, slot].argsort(stable=True)
    block, slot = block[order], slot[order]
    position, position_index = positions[block, slot].unique(return_inverse=True)  # [N], [R]
    # complete blocks are chains
    row_number = torch.full(is_row.shape, -1).index_put((block, slot), torch.arange(len(slot)))  # [B, K]
    is_complete = is_row.all(1)
    total, chain_total = totals(is_supervised.sum(1) if supervised_rows is None else supervised_rows, block_size, decay)
    rows = LossIndex(
        position,
        position_index=position_index,
        step=slot,
        weight=chain_weight * decay ** slot.float(),
        chains=row_number[is_complete].T,
        chain_weight=torch.full((int(is_complete.sum()),), chain_weight),
        offsets=[0, *torch.bincount(position_index, minlength=len(position)).cumsum(0).tolist()],
        total=total,
        chain_total=chain_total,
    )
    roots = slot_zero + 1  # slot 0 at position i estimates x_{i+2}, so the block's root is x_{i+1}
    return BlockPlan(roots, block * block_size + slot, rows)
