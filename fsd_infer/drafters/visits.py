"""Which drafts a rule's walk will visit: what a tree's nodes are chosen by.

Under a rule that emits p, a draft is visited with the product of the chances p on its path, for which a drafter's q
stand in. A rule that gives a nat for λ accepted drafts tilts its law to the drafts and to what lies below them,
r(c) ∝ p(c)·e^(v(c)/λ) with v(c) = 1 + V(c), so it visits deep paths more often. With t = 1/λ, q in place of p and
z(n) = e^(V(n)/λ),

    z(n) = 1 - q(C) + Σ_c q(c)·e^t·z(c),    r̂(c) = q(c)·e^t·z(c) / z(n)

over the children C of n, and z = 1 at leaves. A node is visited with the product of r̂ on its path. It never exceeds its
parent's, so the likeliest form a tree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsd_infer.device.transfer import wide

MOST_TILT = 2.5  # e^(2.5 · 256), of the deepest tree, is still a number; above, hardly any choice changes


def visit_scores(scores: Tensor, parents: Tensor, depth: int, tilt: float) -> Tensor:
    """[B, N] log chances with which nodes are visited.

    Args:
        scores: [B, N] cumulative log q, parents before children, the root first. -inf: never.
        parents: [B, N].
        depth: no node lies deeper.
        tilt: nats given for an accepted draft, at least 0; 0: ``scores`` themselves.
    """
    if not tilt:
        return scores
    tilt = min(tilt, MOST_TILT)
    steps = (scores - scores.gather(1, parents)).to(wide(scores.device))
    steps[:, 0] = -math.inf  # the root is nobody's child
    q = steps.exp()
    z = torch.ones_like(q)
    for _ in range(depth):  # from the leaves up: each time it is right at one more height
        z = torch.ones_like(q).scatter_add(1, parents, q * (math.exp(tilt) * z - 1.0))
    log_z = z.log()
    log_r = (steps + tilt + log_z - log_z.gather(1, parents)).clamp_max(0.0)
    log_r[:, 0] = 0.0
    return path_sums(log_r, parents, depth)


def tilted(log_q: Tensor, tilt: float) -> Tensor:
    """ln q [..., C] of a context's drafts -> ln r̂ [..., C] where nothing is known yet of what lies below them."""
    if not tilt:
        return log_q
    tilt = min(tilt, MOST_TILT)
    return log_q + tilt - (log_q.exp().sum(-1, keepdim=True) * math.expm1(tilt)).log1p()


def likeliest(scores: Tensor, parents: Tensor, depth: int, tilt: float, nodes: int) -> Tensor:
    """[B, K] the root and the up to ``nodes`` - 1 drafts that are visited most likely, the likeliest first.

    So the likeliest path comes early in the tree: where the answer takes it, keys and values lie in place already.
    Arguments as of :func:`visit_scores`.
    """
    visits = visit_scores(scores, parents, depth, tilt)
    # what is no number is kept, to be refused; stable: of equals the earlier node, hence the parent, goes first
    return visits.nan_to_num(0.0, neginf=-math.inf).sort(descending=True, stable=True).indices[:, :nodes]


def path_sums(steps: Tensor, parents: Tensor, depth: int) -> Tensor:
    """[B, N] at each node the sum of ``steps`` on its path, the root's being 0. No node lies deeper than ``depth``."""
    sums = torch.zeros_like(steps)
    for _ in range(depth):  # a child's is its parent's and one step: rounding does not part steps of at most 0
        sums = steps + sums.gather(1, parents)
    return sums
