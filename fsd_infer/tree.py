"""The draft tree: what a drafter proposes, a rule walks and the cache keeps a path of.

Shapes: ``B`` rows of the batch, ``N`` nodes per tree (the root included), ``I`` drafter distributions, ``D`` the
deepest node's depth, ``V`` the target's vocabulary, ``Vd`` the drafter's (a subset of the target's, or all of it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.rows import padded
from fsd_infer.device.transfer import lists, to_device


@dataclass
class DraftTree:
    """Candidate continuations of each row, as a tree of tokens, on the target's device. A chain is a tree of width 1.

    Node 0 is the root: the last token that was emitted, which the target has not read yet. A parent always has
    a smaller index than its children, and siblings carry different tokens. Rows with fewer nodes are padded.

    Attributes:
        tokens: [B, N] token ids in the target's vocabulary.
        parents: [B, N] index of each node's parent; the root's is 0.
        scores: [B, N] estimated log-probability that node i is accepted: 0 at the root, a node's never above its
            parent's, -inf at padding.
        q_logits: [B, I, Vd] the drafter's raw next-token logits (I may be 0).
        q_index: [B, N] row of ``q_logits`` that belongs to node i, or -1 where no distribution is known: at nodes
            without children, and where children come from a drafter without distributions (n-gram lookup). There
            every gate stays closed and the law is the target's.
        draft_ids: [Vd] target id of each drafter vocabulary entry, in any order; None if Vd = V.
        q_scores: [B, I, V] processed drafter logits from which the children were *sampled*, or None where
            the children are a deterministic function of the context (top-k or argmax). Only chains are sampled.
        proposers: [B, N] which of the drafters that the tree's drafter is made of proposed the node, the first of
            several; None if one proposed all.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    q_logits: Tensor
    q_index: Tensor
    draft_ids: Tensor | None = None
    q_scores: Tensor | None = None
    proposers: Tensor | None = None

    @property
    def sampled(self) -> bool:
        return self.q_scores is not None

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool; ``ancestors[b, i, j]`` iff j is on the path root..i, both ends included."""
        return ops.ancestors(self.parents)

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] distance from the root."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def is_draft(self) -> Tensor:
        """[B, N] bool; every node but roots and padding."""
        found = self.scores != -math.inf
        found[:, 0] = False
        return found

    @cached_property
    def child(self) -> Tensor:
        """[B, N, N] bool; is node j a child of node i."""
        nodes = torch.arange(self.parents.shape[1], device=self.parents.device)
        return (self.parents[:, None] == nodes[:, None]) & self.is_draft[:, None]

    @cached_property
    def inner(self) -> Tensor:
        """[B, N] bool; nodes with children."""
        return self.child.any(-1)

    @cached_property
    def first_choices(self) -> Tensor:
        """[B, N] the child with the highest score, the first of equals; -1 where there is none."""
        best = self.scores[:, None].masked_fill(~self.child, -math.inf).argmax(-1)
        return best.masked_fill(~self.inner, -1)

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    @cached_property
    def nodes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents, [B][N] each. Waits for the device."""
        tokens, parents = lists(self.tokens, self.parents)
        return tokens, parents

    def keep(self, nodes: Tensor) -> DraftTree:
        """The part of these nodes [B, K], a parent before its children, the new root first. Leaves have no q."""
        places = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        number = torch.zeros_like(self.parents).scatter(1, nodes, places)  # of what is not kept 0
        parents = number.gather(1, self.parents.gather(1, nodes))
        scores = self.scores.gather(1, nodes)
        kept = replace(
            self,
            tokens=self.tokens.gather(1, nodes),
            parents=parents,
            scores=scores - scores[:, :1],
            proposers=None if self.proposers is None else self.proposers.gather(1, nodes),
        )
        kept.q_index = torch.where(kept.inner, self.q_index.gather(1, nodes), -1)
        return kept

    @classmethod
    def root_only(cls, tokens: Tensor, vocab_size: int) -> DraftTree:
        """A tree without drafts (plain decoding). tokens: [B]."""
        return cls.chain(tokens[:, None], torch.empty(len(tokens), 0, vocab_size, device=tokens.device))

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        q_logits: Tensor,
        draft_ids: Tensor | None = None,
        q_scores: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> DraftTree:
        """A chain: tokens [B, N] with the root first, q_logits [B, N-1, Vd] where row i proposed tokens[:, i+1], or
        none. scores: default 0, sure.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device)
        q_index = torch.where(index < q_logits.shape[1], index, -1)
        return cls(
            tokens=tokens,
            parents=(index - 1).clamp_min(0).expand_as(tokens),
            scores=torch.zeros(tokens.shape, device=tokens.device) if scores is None else scores,
            q_logits=q_logits,
            q_index=q_index.expand_as(tokens),
            draft_ids=draft_ids,
            q_scores=q_scores,
        )

    @classmethod
    def of_lists(cls, rows: Sequence[Nodes], vocab_size: int, device: torch.device) -> DraftTree:
        """A tree per row without q, of drafters that think in Python. ``vocab_size``: V."""
        fills = 0, 0, -math.inf
        tokens, parents, scores = (to_device(padded(x, fill), device) for x, fill in zip(zip(*rows), fills))
        no_q = torch.empty(len(rows), 0, vocab_size, device=device)
        return cls(tokens, parents, scores, no_q, torch.full_like(parents, -1))


Nodes = tuple[list[int], list[int], list[float]]  # tokens, parents and scores of a row's tree, as in DraftTree
