"""Run a target's forward over new tokens after a context as decoding does, for measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from fsd_infer.device.cache import visible_slots
from fsd_infer.device.states import chain_of
from fsd_infer.targets.target import Target


class Probe:
    """A target that runs over a chain of tokens after a context, repeatedly, in the same slots.

    The tokens are consecutive ids.

    Args:
        target: as it decodes.
        context: tokens before the chain, C.
        largest: length of the longest chain.
        rows: B, identical rows.
    """

    def __init__(self, target: Target, context: int, largest: int, rows: int = 1) -> None:
        self.target, self.context = target, context
        self._slots = torch.arange(context + largest, device=target.device).repeat(rows, 1)
        self._tokens = self._slots % target.vocab_size
        self._cache = target.new_cache(rows, context + largest)
        text = self._slots[:, :context]
        self._cache.set_write_slots(text, 0, context)
        target.forward(self._tokens[:, :context], text, text[:, None] <= text[..., None], self._cache, keep=1)

    def __call__(self, nodes: int) -> Tensor:
        """Return logits [B, nodes, V]. Each token sees the context and the chain up to itself."""
        end, rows = self.context + nodes, len(self._slots)
        own = self._slots[:, self.context : end]
        chain = torch.ones(nodes, nodes, dtype=torch.bool, device=own.device).tril()
        visible = visible_slots(torch.full((rows,), self.context), chain.expand(rows, -1, -1))
        self._cache.set_write_slots(own, self.context if rows == 1 else None, end)
        self._cache.recurrent.branches = chain_of(own)  # so that states stay those of the context
        return self.target.forward(self._tokens[:, self.context : end], own, visible, self._cache)[0]
