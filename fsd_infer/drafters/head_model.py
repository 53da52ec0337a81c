"""A draft head as a model with a cache of keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cuda_graphs import CachedModel
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.target import Target


class HeadModel(CachedModel):
    """A draft head on its target's embeddings and features."""

    def __init__(self, head: EagleHead, target: Target) -> None:
        self.head, self.target, self.device = head, target, target.device
        self.cache_config = SimpleNamespace(num_hidden_layers=head.config.num_layers)

    def forward(self, cache: SlotCache, visible: Tensor, tokens: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Run the head.

        Args:
            cache: KV cache of the session, after :meth:`SlotCache.set_write_slots`.
            visible: [B, M, S] bool; whether input m attends to slot s.
            tokens: [B, M] for position i, token i+1 of the text.
            features: [B, M, F] for position i, the target's features of token i, or the head's own estimate [B, M, H].
            positions: [B, M].

        Returns:
            [B, M, H] outputs of the head.
        """
        made: Tensor = self.head(self.head.embed(tokens, self.target), features, positions, visible[:, None], cache)
        return made

    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        width = self.head.config.hidden_size
        none = torch.zeros(1, 1, width, dtype=self.target.dtype, device=self.device)
        self.forward(cache, visible, zero, none, zero)
