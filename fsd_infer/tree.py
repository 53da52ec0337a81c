"""The draft tree: what a drafter proposes and a rule walks.

Shapes: ``B`` rows of the batch, ``N`` nodes per tree (the root included), ``I`` inner nodes (nodes with
children) that carry a drafter distribution, ``D`` the deepest node's depth, ``V`` the target's vocabulary,
``Vd`` the drafter's (a subset of the target's, or all of it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DraftTree:
    """Candidate continuations of each row, as a tree of tokens. A chain is a tree of width 1.

    Node 0 is the root: the last token that was emitted, which the target has not read yet. A parent always has
    a smaller index than its children, and siblings carry different tokens.

    Attributes:
        tokens: [B, N] token ids in the target's vocabulary.
        parents: [B, N] index of each node's parent; the root's is 0.
        depths: [B, N] distance from the root (0 for the root).
        ancestors: [B, N, N] bool; ``ancestors[b, i, j]`` iff j is on the path root..i, both ends included.
        q_logits: [B, I, Vd] the drafter's raw next-token logits at the inner nodes (I may be 0).
        q_index: [B, N] row of ``q_logits`` that belongs to node i, or -1 where no distribution is known
            (exactly the nodes without children).
        draft_ids: [Vd] target id of each drafter vocabulary entry, ascending; None if Vd = V.
        q_scores: [B, I, V] processed drafter logits from which the children were *sampled*, or None where
            the children are a deterministic function of the context (top-k or argmax). Only chains are sampled.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    q_logits: Tensor
    q_index: Tensor
    draft_ids: Tensor | None = None
    q_scores: Tensor | None = None

    @property
    def sampled(self) -> bool:
        return self.q_scores is not None

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    @classmethod
    def root_only(cls, tokens: Tensor, vocab_size: int) -> DraftTree:
        """A tree without drafts (plain decoding). tokens: [B]."""
        batch = tokens.shape[0]
        column = torch.zeros(batch, 1, dtype=torch.long, device=tokens.device)
        return cls(
            tokens=tokens[:, None],
            parents=column,
            depths=column,
            ancestors=torch.ones(batch, 1, 1, dtype=torch.bool, device=tokens.device),
            q_logits=torch.empty(batch, 0, vocab_size, device=tokens.device),
            q_index=column - 1,
        )

    @classmethod
    def chain(
        cls, tokens: Tensor, q_logits: Tensor, draft_ids: Tensor | None = None, q_scores: Tensor | None = None
    ) -> DraftTree:
        """A chain: tokens [B, N] with the root first, q_logits [B, N-1, Vd] where row i proposed tokens[:, i+1]."""
        batch, nodes = tokens.shape
        index = torch.arange(nodes, device=tokens.device)
        q_index = torch.where(index < nodes - 1, index, -1)
        return cls(
            tokens=tokens,
            parents=(index - 1).clamp_min(0).expand(batch, nodes),
            depths=index.expand(batch, nodes),
            ancestors=(index[:, None] >= index[None, :]).expand(batch, nodes, nodes),
            q_logits=q_logits,
            q_index=q_index.expand(batch, nodes),
            draft_ids=draft_ids,
            q_scores=q_scores,
        )


def ancestors_of(parents: Tensor) -> Tensor:
    """[B, N] parents (index order: parent before child) -> [B, N, N] ancestor-or-self matrix."""
    batch, nodes = parents.shape
    step = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=parents.device)
    step.scatter_(2, parents[..., None], True)
    reach = step | torch.eye(nodes, dtype=torch.bool, device=parents.device)
    hops = 1
    while hops < nodes:  # doubling: after k squarings all ancestors within 2**k hops are marked
        reach = (reach.float() @ reach.float()) > 0
        hops *= 2
    return reach


def visible_slots(lengths: Tensor, sees: Tensor) -> Tensor:
    """Which cache slots new tokens may attend to: the whole text, and chosen tokens behind it.

    Args:
        lengths: [B] text length of each row; its tokens occupy the slots before it.
        sees: [B, M, E] bool; may token i attend to the e-th slot behind the text.

    Returns:
        [B, M, S] bool with S = longest text + E.
    """
    extra = sees.shape[-1]
    behind = torch.arange(int(lengths.max()) + extra, device=lengths.device) - lengths[:, None]  # [B, S]
    index = behind.clamp(0, max(extra - 1, 0))[:, None].expand(-1, sees.shape[1], -1)
    inside = (behind >= 0) & (behind < extra)
    return torch.where(inside[:, None], sees.gather(2, index) if extra else inside[:, None], (behind < 0)[:, None])
