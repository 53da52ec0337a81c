"""Which drafts a rule's walk will visit: what a tree's nodes are chosen by.

Under a rule that emits p, a draft is visited with the product of the chances p on its path, for which a drafter's q
stand in. A rule that gives a nat for λ accepted drafts tilts its law to the drafts and to what lies below them,
r(c) ∝ p(c)·e^(v(c)/λ) with v(c) = 1 + V(c), so it visits deep paths more often. With t = 1/λ, q in place of p and
z(n) = e^(V(n)/λ),

    z(n) = 1 - q(C) + Σ_c q(c)·e^t·z(c),    r̂(c) = q(c)·e^t·z(c) / z(n)

over the children C of n, and z = 1 at leaves. Along a path all z but the last cancel, so a node is visited with a
chance in proportion to (its cumulative q)·e^(t·depth)·z. It never exceeds its parent's, so the likeliest form a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_TILT = 2.5  # e^(2.5 · 256), of the deepest tree, is still a number; above, hardly any choice changes


def visit_scores(scores: Sequence[float], parents: Sequence[int], tilt: float) -> list[float]:
    """Log chances, up to a constant, with which nodes are visited.

    Args:
        scores: [N] cumulative log q, parents before children, the root first. -inf: never.
        parents: [N].
        tilt: nats given for an accepted draft, at least 0; 0: ``scores`` themselves.
    """
    if not tilt:
        return list(scores)
    gain = math.exp(min(tilt, MOST_TILT))
    ahead, depths = [1.0] * len(scores), [0] * len(scores)  # ahead: z
    for node in range(1, len(scores)):
        depths[node] = depths[parents[node]] + 1
    for node in range(len(scores) - 1, 0, -1):
        if scores[node] > -math.inf:
            q = math.exp(min(0.0, scores[node] - scores[parents[node]]))
            ahead[parents[node]] += q * (gain * ahead[node] - 1.0)
    visits = [score + depth * math.log(gain) + math.log(z) for score, depth, z in zip(scores, depths, ahead)]
    for node, parent in enumerate(parents):  # rounding must not part a child from its parent
        visits[node] = min(visits[node], visits[parent])
    return visits


def tilted(log_q: Tensor, tilt: float) -> Tensor:
    """ln q [..., C] of a context's drafts -> ln r̂ [..., C] where nothing is known yet of what lies below them."""
    if not tilt:
        return log_q
    tilt = min(tilt, MOST_TILT)
    return log_q + tilt - (log_q.exp().sum(-1, keepdim=True) * math.expm1(tilt)).log1p()


def likeliest(rows: Sequence[tuple[Sequence[float], Sequence[int]]], tilt: float, nodes: int) -> list[list[int]]:
    """Of each row's tree (scores, parents) the ``nodes - 1`` drafts that are visited most likely, ascending."""
    kept = []
    for scores, parents in rows:
        visits = visit_scores(scores, parents, tilt)
        # stable: at equal scores the earlier node, hence the parent, goes first
        best = sorted(range(1, len(visits)), key=visits.__getitem__, reverse=True)
        kept.append(sorted(best[: nodes - 1]))
    return kept


def visit_scores_by_level(levels: Sequence[tuple[Tensor, Tensor, Tensor]], tilt: float) -> Tensor:
    """The same [B, C] of all C candidates of trees that were grown level by level, on any device.

    Args:
        levels: of each, the candidates' cumulative log q [B, E·w], w of them under each of E nodes, these nodes'
            numbers [B, E] (0 is the root, and the candidates follow level by level), and their cumulative log q.
        tilt: as above.
    """
    scores = torch.cat([found for found, _, _ in levels], 1)
    if not tilt:
        return scores
    tilt = min(tilt, MOST_TILT)
    ahead = torch.ones(scores.shape[0], 1 + scores.shape[1], dtype=torch.float64, device=scores.device)
    end = ahead.shape[1]
    for found, nodes, before in reversed(levels):
        start, under = end - found.shape[1], (nodes.shape[1], -1)
        q = (found.unflatten(1, under) - before[..., None]).double().exp()
        worth = math.exp(tilt) * ahead[:, start:end].unflatten(1, under) - 1.0
        ahead = ahead.scatter_add(1, nodes, (q * worth).sum(-1))
        end = start
    visits = ahead[:, :1].log()
    for depth, (found, nodes, _) in enumerate(levels, 1):
        end = visits.shape[1] + found.shape[1]
        own = found + tilt * depth + ahead[:, visits.shape[1] : end].log()
        above = visits.gather(1, nodes).repeat_interleave(found.shape[1] // nodes.shape[1], 1)
        visits = torch.cat([visits, own.minimum(above)], 1)  # rounding must not part a child from its parent
    return visits[:, 1:]
