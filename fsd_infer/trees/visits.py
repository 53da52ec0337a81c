"""Estimate how likely a rule's walk visits each draft, and keep the likeliest drafts of a tree.

A rule that emits p visits a draft with the product of p over the draft's path. The drafter's q stands in for p.

A rule that spends one nat per λ accepted drafts favours drafts and what lies below them: r(c) ∝ p(c)·e^(v(c)/λ) with
v(c) = 1 + V(c). So it visits deep paths more often. With t = 1/λ and z(n) = e^(V(n)/λ),

    z(n) = 1 - q(C) + Σ_c q(c)·e^t·z(c),    r̂(c) = q(c)·e^t·z(c) / z(n)

over the children C of n, and z = 1 at leaves. The product of r̂ over a node's path is the probability of a visit. It
never exceeds the parent's, so the likeliest nodes form a tree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsd_core.functional import path_sums
from fsd_core.tensors import wide

MAX_BONUS = 2.5  # e^(2.5 · 256), for the deepest tree, is finite in fp64; a larger draft bonus hardly changes a choice


def visit_scores(scores: Tensor, parents: Tensor, depth: int, draft_bonus: float | Tensor) -> Tensor:
    """Return the log-probability of a visit to each node: [B, N].

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
    return path_sums(log_r, parents, depth)


def leaf_visit_scores(log_q: Tensor, draft_bonus: float) -> Tensor:
    """Return ln r̂ [..., C] from ln q [..., C] of a context's drafts, as if all of them were leaves."""
    if not draft_bonus:
        return log_q
    draft_bonus = min(draft_bonus, MAX_BONUS)
    return log_q + draft_bonus - (log_q.exp().sum(-1, keepdim=True) * math.expm1(draft_bonus)).log1p()


def select_nodes(
    scores: Tensor, parents: Tensor, depth: int, draft_bonus: float | Tensor, nodes: int, pinned: Tensor | None = None
) -> Tensor:
    """Return the root and up to ``nodes`` - 1 drafts, the likeliest visits first: [B, K] node numbers.

    The likeliest path thus comes early in the tree. If the answer takes it, its keys and values are already in place.
    ``pinned`` [B, N] bool are nodes to keep in any case, with all their ancestors and fewer than ``nodes``. Other
    arguments as of :func:`visit_scores`.
    """
    # Keep NaN scores, so that verification reports them. A stable sort keeps a parent before a child of equal score.
    visits = visit_scores(scores, parents, depth, draft_bonus).nan_to_num(0.0, neginf=-math.inf)
    if pinned is None:
        return visits.sort(descending=True, stable=True).indices[:, :nodes]
    kept = visits.masked_fill(pinned, math.inf).sort(descending=True, stable=True).indices[:, :nodes].sort().values
    return kept.gather(1, visits.gather(1, kept).sort(descending=True, stable=True).indices)
