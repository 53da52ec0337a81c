"""Draft with block heads (:mod:`fsd_infer.heads.blocks`): DFlash, DFlash2, DSpark, Domino, XPress.

A round runs the head once, over the root and masks. A chain takes the likeliest token of every slot, a tree the
likeliest of each depth, which do not depend on the path unless a correction makes them. Drawn nodes follow the slots'
distributions, given the tokens before them if there is a correction. So the distributions of
:mod:`fsd_infer.drafters.drawing` hold unchanged.

**A confidence head** estimates for every node how likely the draft after it is accepted. A node gets no children if the
product of these probabilities along its path falls below ``TreeShape.stop_below``, in place of what q would estimate.
They depend on the node and its ancestors, never on a child, so a cut does not look ahead, and no rule's distribution
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsd_core.tensors import to_device
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.steps import HEADS, FeatureReader, FeatureSession, StepDrafter
from fsd_infer.heads.block_formats import read_block_head
from fsd_infer.heads.blocks import BlockHead
from fsd_infer.heads.kinds import BLOCK
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape


class BlockModel(FeatureReader):
    """A block head whose cache slot i holds keys and values of the target's features at position i."""

    def __init__(self, head: BlockHead, target: Target) -> None:
        self.head, self.target, self.device = head, target, target.device
        self.cache_config = SimpleNamespace(num_hidden_layers=head.config.num_layers)

    def read(self, cache: SlotCache, features: Tensor) -> None:
        """Write the keys and values of features [B, M, F] to the cache's write slots, which are their positions."""
        width = self.target.hidden_size
        x = self.head.context(self.target.features_of(features, self.head.config.layers)[..., width:])
        for index in range(cache.num_layers):
            cache.update(*self.head.keys_values(index, x, cache.slots), index)

    def block(self, cache: SlotCache, tokens: Tensor, visible: Tensor) -> Tensor:
        """Return the states [B, M, H] of blocks [B, M] in the cache's write slots; ``visible`` [B, M, S]."""
        config, positions = self.head.config, cache.slots
        slots = torch.arange(visible.shape[-1], device=visible.device)
        back = positions[..., None] - slots  # how far slot s lies before slot i of the block
        # windows that count from the root include every slot from the root on
        near, more = (back[:, :1], 1) if config.root_windows else (back, 0)
        masks = []
        for window, causal in zip(config.windows, config.causal, strict=True):
            mask = visible if window is None else visible & (near < window + more)
            masks.append(mask & (back >= 0) if causal else mask)
        return self.head(self.embed(tokens), positions, masks, lambda at, k, v: cache.update(k, v, at))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [..., H] of tokens [...]: the head's own if it has them, else the target's."""
        table = self.head.embed_tokens
        return self.target.embed(tokens) if table is None else table(tokens)

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [..., Vd] of states [..., H]. Heads are trained on the LM head without its scale."""
        lm_head = self.head.lm_head or self.target.model.get_output_embeddings()
        logits, cap = lm_head(states), self.head.config.softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


@HEADS.register(BLOCK)
class BlockDrafter(StepDrafter):
    """A block head in any published format (:mod:`fsd_infer.heads.block_formats`).

    Args:
        head: its weights, in the target's dtype and on its device.
        target: the model to draft for.
        shape: see :class:`StepDrafter`.
        draft_ids: [Vd] target id of each row of the head's LM head; None if Vd = V.
    """

    name = "block"
    drafts_beams = reads_features = False  # its block follows the text's features
    head: BlockHead
    model: BlockModel

    def __init__(
        self, head: BlockHead, target: Target, shape: TreeShape | None = None, draft_ids: Tensor | None = None
    ) -> None:
        target.capture_layers(head.config.layers)
        super().__init__(head, target, head.config.depth, shape, draft_ids, BlockModel(head, target))

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> BlockDrafter:
        head, ids = read_block_head(directory, config, target)
        return cls(head, target, shape, ids)

    def slots(self, max_length: int) -> int:
        return max_length + self.head.config.block_size

    def start(self, first_tokens: Tensor, request: DraftRequest) -> BlockSession:
        return BlockSession(self, request, first_tokens)

    def describe(self) -> dict[str, Any]:
        config = self.head.config
        correction = {} if config.correction is None else {"correction": config.correction}
        return {**super().describe(), "block_size": config.block_size, **correction}


class BlockSession(FeatureSession):
    """A session with the keys and values of the text's features.

    Attributes:
        last_tokens: [B, 2] of each text, the newest last.
    """

    per_row = FeatureSession.per_row | {"last_tokens"}
    drafter: BlockDrafter

    def __init__(self, drafter: BlockDrafter, request: DraftRequest, first_tokens: Tensor) -> None:
        super().__init__(drafter, request)
        self.last_tokens = to_device(first_tokens, self.device)[:, None].repeat(1, 2)
        if drafter.head.config.confidence is not None:  # it estimates survival; otherwise q does
            self._min_survival, self.shape = self.shape.stop_below, replace(self.shape, stop_below=0.0)
        self._block: Tensor  # [B, K, H] states of the slots that estimate, in this round
        self._base: Tensor  # [B, K, Vd] their logits

    def _begin(self, roots: Tensor) -> Tensor:
        model, config = self.drafter.model, self.drafter.head.config
        batch, size = len(roots), config.block_size
        tokens = torch.full((batch, size), config.mask_token_id, dtype=torch.long, device=self.device)
        tokens[:, 0] = roots
        everyone = torch.ones(batch, size, size, dtype=torch.bool, device=self.device)
        _, visible = self.cache.after_text(self.lengths, everyone)
        block = model.block(self.cache, tokens, visible)
        self._block = block[:, config.fills_in :]
        self._base = model.logits(self._block)
        if config.confidence is not None:
            self._survival = torch.zeros(batch, 1, device=self.device)
        return self.drafter.head.begin(block, self.last_tokens)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        ends = counts[:, None] + torch.arange(2, device=self.device)
        self.last_tokens.copy_(torch.cat([self.last_tokens, tokens], 1).gather(1, ends))
        super().extend(tokens, features, counts)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.last_tokens]

    def _step(self, depth: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        head, shape = self.drafter.head, (*tokens.shape, -1)
        slot = self._block[:, depth, None].expand(shape)
        if self._survival is not None:
            self._survival = self._survival + torch.nn.functional.logsigmoid(head.confidence(slot, tokens))
        embeds = self.drafter.model.embed(tokens) if head.config.correction == "domino" else None
        logits = self._base[:, depth, None].expand(shape)
        return head.corrected(depth, logits, slot, tokens, state, embeds)
