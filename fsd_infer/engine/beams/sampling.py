"""Draws without replacement by random numbers tied to the candidates, which drafting can reuse.

Candidate y of weight w(y) arrives at time E(y) / w(y), with independent exponential variables E(y). The first n to
arrive are n ordered draws without replacement (the Gumbel-top-k trick, Kool et al., arXiv 1903.06059). E(y) is a
function of the request's seed and of y's whole text. So draws do not depend on the drafts, and a drafter with similar
weights sees the same candidates arrive first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsd_infer.engine.beams.forest import GOLDEN, WORD, Guess, Node, mixed

Draw = tuple[float, int, int]  # score, beam, token


def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def exponentials(keys: Sequence[int], tokens: Tensor) -> Tensor:
    """Return independent exponentials [R, C] fp64 for successors tokens [R, C] of nodes with these R keys."""
    start = torch.tensor([[_signed(key)] for key in keys])
    x = start + _signed(GOLDEN) * (tokens + 1)
    # forest.mixed in signed integers that wrap around; the masks make >> logical
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    x = x ^ ((x >> 31) & (1 << 33) - 1)
    # one more step, since a child's key is the number so far
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
    nodes: Sequence[Node], scores: Sequence[float], count: int, weights_of: Callable[[Node], Tensor]
) -> list[Draw]:
    """Draw up to ``count`` successors of ``nodes`` without replacement, in order.

    A successor's weight is exp(score of its node + its processed log-probability). Successors in ``Node.likely`` have
    arrival times. The others, which no drafter lists, arrive as one Poisson process. Its waiting time is exponential
    with their total weight as rate, and a draw by weight picks one of them.

    Args:
        nodes: the live beams, with ``likely`` set.
        scores: of the beams.
        count: of draws.
        weights_of: returns exp of the processed log-probabilities of all successors of a node, [V] fp64; called only
            for a draw outside ``likely``.
    """
    lists = [node.likely or ([], []) for node in nodes]
    highest = max(scores)
    times = arrivals(nodes, [score - highest for score in scores], lists)
    columns = times.shape[1]
    first, where = times.flatten().sort()
    drawn: list[tuple[float, int, int, float]] = []  # ln time, beam, token, log-probability
    for time, place in zip(first[:count].tolist(), where[:count].tolist()):
        if time == math.inf:
            break
        beam, column = divmod(place, columns)
        values, tokens = lists[beam]
        drawn.append((time, beam, tokens[column], values[column]))

    rates = [math.exp(score - highest) * node.rest for node, score in zip(nodes, scores)]
    chances = _uniforms(nodes)
    time = 0.0
    taken: dict[int, Tensor] = {}
    while (total := sum(rates)) > 0.0:
        time += -math.log(next(chances)) / total
        if len(drawn) >= count and math.log(time) >= drawn[count - 1][0]:
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
        if float(sums[-1]) <= 0.0:  # only a rounding error of the rate remained
            rates[beam] = 0.0
            continue
        token = int(torch.searchsorted(sums, next(chances) * sums[-1], right=True).clamp_max(len(sums) - 1))
        if weights[token] <= 0.0:  # at the very end of the sums
            token = int(weights.nonzero()[-1])
        weight = float(weights[token])
        drawn.append((math.log(time), beam, token, math.log(weight)))
        drawn.sort()
        weights[token] = 0.0
        rates[beam] = math.exp(scores[beam] - highest) * float(weights.sum())
    return [(scores[beam] + value, beam, token) for _, beam, token, value in drawn[:count]]


def _uniforms(nodes: Sequence[Node]):  # type: ignore[no-untyped-def]
    """Yield uniform numbers in (0, 1) that depend on this set of beams alone."""
    key = 0
    for node in nodes:
        key = mixed(key ^ node.key)
    while True:
        key = (key + GOLDEN) & WORD
        yield ((mixed(key ^ 0xA5A5A5A5A5A5A5A5) >> 11) + 0.5) * 2.0**-53
