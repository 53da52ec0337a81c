"""Draws without replacement whose randomness belongs to the candidates, so that drafts can share it.

Candidate y of weight w(y) arrives at time E(y) / w(y), with E(y) an exponential variable of its own: the first n to
arrive are n draws without replacement, in their order (the Gumbel-top-k trick, Kool et al., arXiv 1903.06059). E(y) is
a function of the request's seed and of y's whole text. So a beam is drawn or not whatever was drafted, and a drafter
that weighs candidates much as the target does sees the same ones arrive first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsd_infer.beams.forest import GOLDEN, WORD, Guess, Node, mixed

Draw = tuple[float, int, int]  # score, beam, token


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def exponentials(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """E of the successors tokens [R, C] of the nodes of these R keys: [R, C] fp64, all independent of each other."""
    start = torch.tensor([[_signed(key)] for key in keys])
    x = start + _signed(GOLDEN) * (tokens + 1)
    # as forest.mixed, in signed numbers that wrap around: >> must not bring in ones
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    x = x ^ ((x >> 31) & (1 << 33) - 1)
    # once more: a child's key is this very number
    x = (x ^ ((x >> 32) & (1 << 32) - 1)) * _signed(0xD6E8FEB86659FD93)
    x = x ^ ((x >> 32) & (1 << 32) - 1)
    return -((((x >> 11) & (1 << 53) - 1).double() + 0.5) * 2.0**-53).log()


def arrivals(nodes: Sequence[Node], scores: Sequence[float], lists: Sequence[Guess]) -> Tensor:
    """ln of the time at which each listed successor arrives, [R, C]; inf where a list is shorter than the longest.

    Args:
        nodes: R of them.
        scores: ln of each node's weight.
        lists: of each node the log-probabilities of some successors, and their tokens.
    """
    most = max(len(tokens) for _, tokens in lists)
    tokens = torch.tensor([[*tokens, *[0] * (most - len(tokens))] for _, tokens in lists])
    values = torch.tensor([[*values, *[-math.inf] * (most - len(values))] for values, _ in lists], dtype=torch.double)
    weights = values + torch.tensor(scores, dtype=torch.double)[:, None]
    return exponentials([node.key for node in nodes], tokens).log() - weights


def draw(
    nodes: Sequence[Node],
    scores: Sequence[float],
    count: int,
    weights_of: Callable[[Node], Tensor],
) -> list[Draw]:
    """``count`` draws without replacement from all successors of ``nodes``, in order; fewer if there are fewer.

    A successor's weight is exp(score of its node + its processed log-probability). Successors in ``Node.likely`` arrive
    at times of their own. The others, which no drafter looks at, arrive one by one: after an exponential time at the
    rate of all their weights, by draws from them.

    Args:
        nodes: the live beams, read by the target and looked at.
        scores: of the beams.
        count: of draws.
        weights_of: exp of the processed log-probabilities of all successors of a node, [V] fp64; asked only for a
            draw that is not in ``likely``.
    """
    lists = [node.likely or ([], []) for node in nodes]
    highest = max(scores)
    times = arrivals(nodes, [score - highest for score in scores], lists)
    columns = times.shape[1]
    first, where = times.flatten().sort()
    found: list[tuple[float, int, int, float]] = []  # ln time, beam, token, log-probability
    for time, place in zip(first[:count].tolist(), where[:count].tolist()):
        if time == math.inf:
            break
        beam, column = divmod(place, columns)
        values, tokens = lists[beam]
        found.append((time, beam, tokens[column], values[column]))

    rates = [math.exp(score - highest) * node.rest for node, score in zip(nodes, scores)]
    chances = _uniforms(nodes)
    time = 0.0
    taken: dict[int, Tensor] = {}
    while (total := sum(rates)) > 0.0:
        time += -math.log(next(chances)) / total
        if len(found) >= count and math.log(time) >= found[count - 1][0]:
            break
        share, beam = next(chances) * total, 0
        while beam < len(rates) - 1 and share >= rates[beam]:
            share -= rates[beam]
            beam += 1
        if beam not in taken:
            taken[beam] = weights_of(nodes[beam])
            taken[beam][lists[beam][1]] = 0.0
        weights = taken[beam]
        sums = weights.cumsum(0)
        if float(sums[-1]) <= 0.0:  # what was left is rounding
            rates[beam] = 0.0
            continue
        token = int(torch.searchsorted(sums, next(chances) * sums[-1], right=True).clamp_max(len(sums) - 1))
        if weights[token] <= 0.0:  # at the very end of the sums
            token = int(weights.nonzero()[-1])
        weight = float(weights[token])
        found.append((math.log(time), beam, token, math.log(weight)))
        found.sort()
        weights[token] = 0.0
        rates[beam] = math.exp(scores[beam] - highest) * float(weights.sum())
    return [(scores[beam] + value, beam, token) for _, beam, token, value in found[:count]]


def _uniforms(nodes: Sequence[Node]):  # type: ignore[no-untyped-def]
    """Uniform numbers in (0, 1) that belong to this set of beams."""
    key = 0
    for node in nodes:
        key = mixed(key ^ node.key)
    while True:
        key = (key + GOLDEN) & WORD
        yield ((mixed(key ^ 0xA5A5A5A5A5A5A5A5) >> 11) + 0.5) * 2.0**-53
