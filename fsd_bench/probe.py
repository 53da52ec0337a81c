"""Run a target's forward over new tokens after a context as decoding does, for measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from fsd_infer.device.rows import visible_slots
from fsd_infer.targets.target import Target


class Probe:
    """A target that runs over a chain of tokens after a context, repeatedly, in the same slots.

    The tokens are consecutive ids.

    Args:
        target: as it decodes.
        context: tokens before the chain, C.
        largest: length of the longest chain.
        rows: B, identical rows.

    Attributes:
        features: [B, C, F], the context's features.
    """

    def __init__(self, target: Target, context: int, largest: int, rows: int = 1) -> None:
        self.target, self.context = target, context
        self._slots = torch.arange(context + largest, device=target.device).repeat(rows, 1)
        self._tokens = self._slots % target.vocab_size
        self._lengths = torch.full((rows,), context)
        self._cache = target.new_cache(rows, context + largest)
        text = self._slots[:, :context]
        self._cache.set_write_slots(text, 0, context)
        causal = text[:, None] <= text[..., None]
        _, self.features = target.forward(self._tokens[:, :context], text, causal, self._cache, keep=1)

    def tokens(self, nodes: int) -> Tensor:
        """Return the chain [B, nodes]."""
        return self._tokens[:, self.context : self.context + nodes]

    def visible(self, nodes: int) -> Tensor:
        """Return the mask [B, nodes, C + nodes]: each token sees the context and the chain up to itself."""
        chain = torch.ones(nodes, nodes, dtype=torch.bool, device=self._slots.device).tril()
        return visible_slots(self._lengths, chain.expand(len(self._lengths), -1, -1))

    def __call__(self, nodes: int, visible: Tensor | None = None) -> Tensor:
        """Return logits [B, nodes, V]. A mask that was not made before is made here, as in a round."""
        end = self.context + nodes
        own = self._slots[:, self.context : end]
        self._cache.set_write_slots(own, self.context if len(own) == 1 else None, end)
        visible = self.visible(nodes) if visible is None else visible
        return self.target.forward(self.tokens(nodes), own, visible, self._cache)[0]
