"""The draft tree: a drafter proposes it, a rule walks it, and the cache keeps its accepted path.

Of the candidates that a drafter proposes, those that a walk visits most likely are worth verifying.

Shapes: B batch rows; N nodes per tree, the root included; I drafter distributions; D the depth of the deepest node. V
is the size of the target's vocabulary. Vd is the size of the drafter's, which is a subset of the target's or all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.former import Renamed
from fsd_core.functional import wide
from fsd_core.tensors import lists, to_device

MAX_BONUS = 2.5  # e^(2.5 · 256), for the deepest tree, is finite in fp64; a larger draft bonus hardly changes a choice


class Draws(Enum):
    """Which drafts are drawn from q above temperature 0: in a request, or as a rule takes them."""

    NONE = "none"  # trees of likely tokens
    CHAIN = "chain"  # all, and each has one child
    TREE = "tree"  # at most one child of a node, see :mod:`fsd_infer.drafters.drawing`
    ANY = "any"  # only in rules: as the drafter does best, see :attr:`.Drafter.draws_chains`


@dataclass
class DraftTree(Renamed):
    """A tree of candidate tokens per batch row, on the target's device. A chain is a tree of width 1.

    Node 0 is the root: the last emitted token, which the target has not read yet. Parents precede their children, and
    siblings have different tokens. Rows with fewer nodes are padded.

    Attributes:
        tokens: [B, N] token ids in the target's vocabulary.
        parents: [B, N] index of each node's parent; the root's is 0.
        scores: [B, N] estimated log-probability that a node is accepted: 0 at the root, at most the parent's, -inf at
            padding.
        q_logits: [B, I, Vd] the drafter's raw next-token logits (I may be 0).
        q_index: [B, N] each node's row of ``q_logits``. -1 where q is unknown: at nodes without children, and below
            drafters without distributions (n-gram lookup). There gates stay closed and the distribution is the
            target's.
        draft_ids: [Vd] target id of each drafter vocabulary entry, in any order; None if Vd = V.
        q_scores: [B, I, Vd] logits of the distributions from which children were *drawn*, after the request's
            processors and without the tokens of fixed children. None if all children are a function of the context
            (top-k or argmax).
        drawn: [B, N] whether a node was drawn from its parent's row of ``q_scores``, at most one child per node; None
            with ``q_scores``: all drafts, which form a chain. Dropping a drawn node would change the output's
            distribution, see :mod:`fsd_infer.drafters.drawing`.
        fixed: [B, I, w] entries of the drafter's vocabulary that were fixed as children before another child was drawn
            from the row of ``q_scores``, verified or not; -1: none. None if no node was drawn, or all were.
        proposers: [B, N] index of the drafter part that proposed each node, the first of several; None if there is one
            part.
        forecast: [B, S + 1] see :func:`fsd_infer.trees.shape.forecast`; None: not requested.
        depth_bound: at least the depth of the deepest node, as far as the host knows; None: not known.
    """

    former_members = {"child": "is_child", "inner": "has_children"}

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    q_logits: Tensor
    q_index: Tensor
    draft_ids: Tensor | None = None
    q_scores: Tensor | None = None
    proposers: Tensor | None = None
    drawn: Tensor | None = None
    fixed: Tensor | None = None
    forecast: Tensor | None = None
    depth_bound: int | None = None

    @property
    def sampled(self) -> bool:
        return self.q_scores is not None

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool; whether j is on the path from the root to i, both included, at [b, i, j]."""
        return functional.ancestors(self.parents)

    @cached_property
    def depths(self) -> Tensor:
        """[B, N] distance from the root."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def is_draft(self) -> Tensor:
        """[B, N] bool; all nodes except roots and padding."""
        drafted = self.scores != -math.inf
        drafted[:, 0] = False
        return drafted

    @cached_property
    def is_child(self) -> Tensor:
        """[B, N, N] bool; whether node j is a child of node i."""
        nodes = torch.arange(self.parents.shape[1], device=self.parents.device)
        return (self.parents[:, None] == nodes[:, None]) & self.is_draft[:, None]

    @cached_property
    def has_children(self) -> Tensor:
        """[B, N] bool; nodes with children."""
        return self.is_child.any(-1)

    @cached_property
    def first_choices(self) -> Tensor:
        """[B, N] the child with the highest score that was not drawn, the first of equals; -1 if there is none."""
        eligible = self.is_child if self.drawn is None else self.is_child & ~self.drawn[:, None]
        best = self.scores[:, None].masked_fill(~eligible, -math.inf).argmax(-1)
        return best.masked_fill(~eligible.any(-1), -1)

    @cached_property
    def max_depth(self) -> int:
        """At least the depth of the deepest node: its builder's bound, else computed where the host may read it."""
        most = self.parents.shape[1] - 1
        return functional.host_max(self.depths, most) if self.depth_bound is None else min(self.depth_bound, most)

    @cached_property
    def pinned(self) -> Tensor | None:
        """[B, N] bool; drawn nodes and their ancestors, which every part of the tree keeps. None if none is drawn."""
        return None if self.drawn is None else (self.ancestors & self.drawn[..., None]).any(1)

    @cached_property
    def nodes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens and parents as lists, [B][N] each. Syncs with the device."""
        tokens, parents = lists(self.tokens, self.parents)
        return tokens, parents

    def keep(self, nodes: Tensor) -> DraftTree:
        """Return the tree of these nodes [B, K], parents before children, the new root first. Leaves lose their q."""
        given = self.tokens, self.parents, self.scores, self.q_index, self.proposers, self.drawn
        tokens, parents, scores, q_index, proposers, drawn, computed = functional.keep_nodes(*given, nodes)
        part = replace(
            self, tokens=tokens, parents=parents, scores=scores, q_index=q_index, proposers=proposers, drawn=drawn
        )
        if computed is not None:
            part.is_draft, part.is_child = computed
        return part

    def likeliest(self, depth: int, draft_bonus: float, nodes: int) -> DraftTree:
        """Return the tree of the nodes that :func:`select_nodes` selects, and of the drawn ones."""
        return self.keep(select_nodes(self.scores, self.parents, depth, draft_bonus, nodes, self.pinned))

    def padded_to(self, count: int) -> DraftTree:
        """Return the tree padded to at least ``count`` nodes."""
        more = count - self.tokens.shape[1]
        if more <= 0:
            return self
        padded: dict[str, Any] = {
            name: torch.nn.functional.pad(values, (0, more), value=fill)
            for name, fill in _PADDING.items()
            if (values := getattr(self, name)) is not None
        }
        return replace(self, **padded)

    @classmethod
    def root_only(cls, tokens: Tensor, vocab_size: int) -> DraftTree:
        """Return a tree without drafts, for plain decoding. tokens: [B]."""
        return cls.chain(tokens[:, None].clone(), torch.empty(len(tokens), 0, vocab_size, device=tokens.device))

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        q_logits: Tensor,
        draft_ids: Tensor | None = None,
        q_scores: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> DraftTree:
        """Return a chain.

        Args:
            tokens: [B, N], the root first.
            q_logits: [B, N-1, Vd], where row i proposed tokens[:, i+1], or [B, 0, Vd].
            draft_ids: as in the class.
            q_scores: as in the class.
            scores: as in the class (default: 0).
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
            depth_bound=tokens.shape[1] - 1,
        )

    @classmethod
    def of_lists(
        cls, rows: Sequence[Nodes], vocab_size: int, device: torch.device, depth_bound: int | None = None
    ) -> DraftTree:
        """Return trees without q, from drafters that build them as lists. ``vocab_size``: V."""
        packed = cls.packed_lists(rows, max(len(tokens) for tokens, _, _ in rows))
        return cls.of_packed(to_device(packed, device), vocab_size, depth_bound)

    @staticmethod
    def packed_lists(rows: Sequence[Nodes], count: int) -> Tensor:
        """Return trees of lists as one tensor [3, B, count] on the CPU, in fp32, for :meth:`of_packed`."""
        fields = zip(zip(*rows), _FILLS)  # tokens, parents and scores of all rows, and what each is padded with
        parts = [[[*row, *[fill] * (count - len(row))] for row in values] for values, fill in fields]
        return torch.tensor(parts, dtype=torch.float32)  # exact for whole numbers up to 2^24

    @classmethod
    def of_packed(cls, values: Tensor, vocab_size: int, depth_bound: int | None = None) -> DraftTree:
        """Return the trees of :meth:`packed_lists`, on any device. Arguments as for :meth:`of_lists`."""
        tokens, parents, scores = values
        no_q = torch.empty(len(tokens), 0, vocab_size, device=tokens.device)
        no_index = torch.full_like(parents, -1, dtype=torch.long)
        return cls(tokens.long(), parents.long(), scores.clone(), no_q, no_index, depth_bound=depth_bound)


_FILLS = (0, 0, -math.inf)  # what rows of lists are padded with
_PADDING = {"tokens": 0, "parents": 0, "scores": -math.inf, "q_index": -1, "proposers": 0, "drawn": False}
Nodes = tuple[list[int], list[int], list[float]]  # tokens, parents and scores of a row's tree, as in DraftTree


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Return the nodes from below the root to this one."""
    path = []
    while node:
        path.append(node)
        node = parents[node]
    return path[::-1]


def select_nodes(
    scores: Tensor, parents: Tensor, depth: int, draft_bonus: float | Tensor, nodes: int, pinned: Tensor | None = None
) -> Tensor:
    """Return the root and up to ``nodes`` - 1 drafts, the likeliest visits first: [B, K] node numbers.

    The likeliest path thus comes early in the tree. If the answer takes it, its keys and values are already in place.
    ``pinned`` [B, N] bool are nodes to keep in any case, with all their ancestors and fewer than ``nodes``. Other
    arguments as for :func:`visit_scores`.
    """
    # Keep NaN scores, so that verification reports them. A stable sort keeps a parent before a child of equal score.
    visits = visit_scores(scores, parents, depth, draft_bonus).nan_to_num(0.0, neginf=-math.inf)
    if pinned is None:
        return visits.sort(descending=True, stable=True).indices[:, :nodes]
    kept = visits.masked_fill(pinned, math.inf).sort(descending=True, stable=True).indices[:, :nodes].sort().values
    return kept.gather(1, visits.gather(1, kept).sort(descending=True, stable=True).indices)


def visit_scores(scores: Tensor, parents: Tensor, depth: int, draft_bonus: float | Tensor) -> Tensor:
    """Estimate the log-probability that a rule's walk visits each node: [B, N].

    A rule that emits p visits a draft with the product of p over the draft's path. The drafter's q stands in for p.

    A rule that spends one nat per λ accepted drafts favours drafts and what lies below them: r(c) ∝ p(c)·e^(v(c)/λ)
    with v(c) = 1 + V(c). So it visits deep paths more often. With t = 1/λ and z(n) = e^(V(n)/λ),

        z(n) = 1 - q(C) + Σ_c q(c)·e^t·z(c),    r̂(c) = q(c)·e^t·z(c) / z(n)

    over the children C of n, and z = 1 at leaves. The product of r̂ over a node's path is the probability of a visit. It
    never exceeds the parent's, so the likeliest nodes form a tree.

    Args:
        scores: [B, N] cumulative log q, the root first and parents before children; -inf at padding.
        parents: [B, N] node numbers.
        depth: at least that of the deepest node.
        draft_bonus: t, nats that the distribution gives for an accepted draft, at least 0: a number, or [B, N] of each
            node. The number 0 returns ``scores``.
    """
    if isinstance(draft_bonus, Tensor):
        draft_bonus = draft_bonus.to(wide(scores.device)).clamp_max(MAX_BONUS)
        factor: float | Tensor = draft_bonus.exp()
    elif draft_bonus:
        draft_bonus = min(draft_bonus, MAX_BONUS)
        factor = math.exp(draft_bonus)
    else:
        return scores
    steps = (scores - scores.gather(1, parents)).masked_fill(scores == -math.inf, -math.inf).to(wide(scores.device))
    steps[:, 0] = -math.inf  # the root is its own parent, but no child
    q = steps.exp()
    z = torch.ones_like(q)
    for _ in range(depth):  # each pass makes z right one level further above the leaves
        z = torch.ones_like(q).scatter_add(1, parents, q * (factor * z - 1.0))
    log_z = z.log()
    log_r = (steps + draft_bonus + log_z - log_z.gather(1, parents)).clamp_max(0.0)
    log_r[:, 0] = 0.0
    return functional.path_sums(log_r, parents, depth)


def leaf_visit_scores(log_q: Tensor, draft_bonus: float) -> Tensor:
    """Return ln r̂ [..., C] from ln q [..., C] of a context's drafts, as if all of them were leaves."""
    if not draft_bonus:
        return log_q
    draft_bonus = min(draft_bonus, MAX_BONUS)
    return log_q + draft_bonus - (log_q.exp().sum(-1, keepdim=True) * math.expm1(draft_bonus)).log1p()
