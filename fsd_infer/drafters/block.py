"""Drafting trees from one pass of a head that drafts blocks (:mod:`fsd_infer.heads.block`).

The pass reads the text's new tokens and K-1 masks, whatever the tree. Its outputs say what may follow at each depth,
and the Markov term what may follow a given draft, so a tree is grown as an EAGLE-2 tree is, depth by depth, without
another pass of the layers: q at a node is softmax(LM head(h' of its depth and token)), for all rules and laws alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fsd_infer.device.transfer import to_device
from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest
from fsd_infer.drafters.eagle import EagleDrafter, EagleSession
from fsd_infer.drafters.shape import TreeShape
from fsd_infer.heads.block import Block
from fsd_infer.heads.checkpoint import drafts_blocks
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target
from fsd_infer.tree import at_nodes


@DRAFTERS.register("block")
class BlockDrafter(EagleDrafter):
    """An :class:`EagleHead` with ``block_size``; arguments as :class:`EagleDrafter`.

    Its trees are at most ``block_size`` deep.
    """

    name = "block"

    def __init__(
        self, head: EagleHead, target: Target, shape: TreeShape | None = None, context_ids: bool = True
    ) -> None:
        super().__init__(head, target, shape, context_ids)
        self.shape = self._cut(self.shape)

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return cls.from_pretrained(name, target, tree) if drafts_blocks(name) else None

    def reshaped(self, shape: TreeShape) -> EagleDrafter:
        return super().reshaped(self._cut(shape))

    def _cut(self, shape: TreeShape) -> TreeShape:
        return replace(shape, depth=min(shape.depth, self.head.config.block_size))

    def start(self, first_tokens: Tensor, request: DraftRequest) -> EagleSession:
        return BlockSession(self, request)

    def slots(self, longest: int) -> int:
        return longest + self.head.config.block_size - 1


class BlockSession(EagleSession):
    """As :class:`EagleSession`; the masks stand after the text and are overwritten by its next tokens."""

    def __init__(self, drafter: EagleDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        block = drafter.head.block
        assert block is not None, "the drafter has a head of another kind"
        self.block: Block = block
        self.masks = drafter.head.config.block_size - 1
        self.outputs: Tensor | None = None  # [B, K-1, H] of the masks

    def _followed(self, tokens: Tensor, features: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.arange(tokens.shape[1] + self.masks)
        ends, read = (counts - 1).clamp_min(0)[:, None], counts[:, None]
        masks = -(columns - read + 1).clamp(1, self.masks)
        shown = tokens.gather(1, torch.minimum(columns, ends))
        places = to_device(torch.minimum(columns, ends), self.device)
        return torch.where(columns < read, shown, masks), at_nodes(features, places)

    def _keep(self, outputs: Tensor, counts: Tensor) -> None:
        super()._keep(outputs, counts)
        places = to_device(counts[:, None] + torch.arange(self.masks), self.device)
        self.outputs = self._kept(at_nodes(outputs, places), self.outputs, counts)

    def _expand(self, tokens: Tensor, parent_features: Tensor, sees: Tensor, depth: int) -> Tensor:
        assert self.outputs is not None
        here = self.outputs[:, depth - 1 : depth].expand(-1, tokens.shape[1], -1)
        below: Tensor = self.block(here, self.drafter.head.embed(tokens, self.drafter.target), parent_features)
        return below

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.outputs = None if self.outputs is None else self.outputs[to_device(rows, self.device)]
