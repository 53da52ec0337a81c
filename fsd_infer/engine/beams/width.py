"""Dynamic width of beam sampling: the number of beams that a step keeps.

A search continues within a forward as long as all beams that a step keeps were drafted. So a step keeps the most beams
that are all drafted with a given probability. A fixed set of simulated races estimates that probability. A race has
arrival times by the target's and by the drafter's weights, and chooses nodes as drafting does. The races are the same
for every step and seed, and independent of the draws of beams. So the width is a function of the two models'
distributions. Given the width, the draws have the law of beam sampling with that width.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fsd_infer.engine.beams.forest import Guess, Node

RACES = 64


@lru_cache(maxsize=64)
def _log_exponentials(size: int) -> Tensor:
    """ln of independent exponentials, [races, size] fp64, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.empty(size, RACES, dtype=torch.double).exponential_(generator=generator).log().T.contiguous()


def chances_of_width(
    scores: Sequence[float],
    target: Sequence[Guess],
    drafter: Sequence[Guess],
    width: int,
    breadth: int,
    per_beam: int,
    ends: Collection[int] = (),
) -> list[float]:
    """Return the probability that all beams of a step of width n are drafted, for n from 1 to ``width``.

    Args:
        scores: of the live beams, ln of their weights.
        target: the target's likely successors of each beam.
        drafter: the drafter's likely successors of each beam.
        width: W, most beams.
        breadth: number of drafted nodes.
        per_beam: K; a step of width n draws K·n candidates.
        ends: tokens that end an answer; they need no node.
    """
    highest = max(scores)
    (of_target, of_drafter), going = _aligned([score - highest for score in scores], target, drafter, ends)
    size = len(going)
    log_e = _log_exponentials(size)
    drawn = min(per_beam * width, size)

    # nodes as chosen by Planner: of the candidates that arrive first by the drafter's weights, the likeliest
    first = (log_e - of_drafter).topk(drawn, largest=False).indices
    best = of_drafter[first].masked_fill(~going[first], -math.inf).topk(min(breadth, drawn))
    drafted = torch.zeros(log_e.shape, dtype=torch.bool)
    drafted.scatter_(1, first.gather(1, best.indices), best.values > -math.inf)

    arrived = (log_e - of_target).topk(drawn, largest=False).indices
    ranked = of_target[arrived].masked_fill(~going[arrived], -math.inf)
    ready = drafted.gather(1, arrived) | (ranked == -math.inf)
    chances = []
    for n in range(1, width + 1):
        kept = ranked[:, : per_beam * n].topk(min(n, drawn)).indices
        chances.append(float(ready.gather(1, kept).all(1).double().mean()))
    return chances


def dynamic_width(chances: Sequence[float], confidence: float, fewest: int) -> int:
    """Return max(fewest, largest n whose probability is at least ``confidence``)."""
    return max([fewest, *(n for n, chance in enumerate(chances, 1) if chance >= confidence)])


def guesses_of(nodes: Sequence[Node]) -> tuple[list[Guess], list[Guess]]:
    """Return the target's and the drafter's likely successors of these read nodes; the target's if not proposed."""
    target = [node.likely or ([], []) for node in nodes]
    return target, [node.proposed or known for node, known in zip(nodes, target)]


def _aligned(
    scores: Sequence[float], target: Sequence[Guess], drafter: Sequence[Guess], ends: Collection[int]
) -> tuple[Tensor, Tensor]:
    """Return scores [2, beams · C] of the candidates by target and drafter (-inf if not listed), and which continue."""
    tokens = [list(dict.fromkeys([*known[1], *guess[1]])) for known, guess in zip(target, drafter)]
    most = max(map(len, tokens))
    rows = []
    for lists in (target, drafter):
        for score, (values, own), union in zip(scores, lists, tokens):
            of = dict(zip(own, values))
            rows.append([score + of.get(token, -math.inf) for token in union] + [-math.inf] * (most - len(union)))
    goes = [[token not in ends for token in union] + [False] * (most - len(union)) for union in tokens]
    return torch.tensor(rows, dtype=torch.double).view(2, -1), torch.tensor(goes).flatten()
