"""Draws without replacement by random numbers tied to the candidates, which drafting can reuse.

Candidate y of weight w(y) arrives at time E(y) / w(y), with independent exponential variables E(y). The first n to
arrive are n ordered draws without replacement (the Gumbel-top-k trick, Kool et al., arXiv 1903.06059). E(y) is a
function of the request's seed and of y's whole text. So draws do not depend on the drafts, and a drafter with similar
weights sees the same candidates arrive first.

**Dynamic width.** A search continues within a forward as long as all beams that a step keeps were drafted. So a step
keeps the most beams that are all drafted with a given probability. A fixed set of simulated races estimates that
probability. A race has arrival times by the target's and by the drafter's weights, and chooses nodes as drafting does.
The races are the same for every step and seed, and independent of the draws of beams. So the width is a function of the
two models' distributions. Given the width, the draws have the distribution of beam sampling with that width.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fsd_core.tensors import padded
from fsd_infer.drafters.frontier import Successors
from fsd_infer.engine.beams.search import Draw, Search

RACES = 64  # simulated for the dynamic width
Arrival = tuple[float, int, int, float]  # ln of its time, index of the node, token, log-probability


def exponentials(text_hashes: Sequence[int], tokens: Tensor) -> Tensor:
    """Return independent exponentials [R, C] fp64 for successors [R, C] of nodes whose texts have these R hashes."""
    x = torch.tensor(text_hashes)[:, None] - 0x61C8864680B583EB * (tokens + 1)
    # the finalizer of splitmix64 (Steele et al. 2014) in signed integers that wrap around; the masks make >> logical
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    x = x ^ (x >> 31 & (1 << 33) - 1)
    return -(((x >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53).log()


def first_arrivals(
    text_hashes: Sequence[int], scores: Sequence[float], lists: Sequence[Successors], count: int
) -> list[Arrival]:
    """Return the first ``count`` of all listed successors to arrive, in this order.

    Args:
        text_hashes: the text hashes of R nodes.
        scores: ln of each node's weight.
        lists: log-probabilities and tokens of some successors of each node.
        count: number of arrivals.
    """
    tokens = padded([tokens for _, tokens in lists]).long()
    values = padded([values for values, _ in lists], -math.inf).double()
    weights = values + torch.tensor(scores, dtype=torch.double)[:, None]
    times, order = (exponentials(text_hashes, tokens).log() - weights).flatten().sort()
    arrivals = []
    for time, index in zip(times[:count].tolist(), order[:count].tolist()):
        node, column = divmod(index, tokens.shape[1])
        if time < math.inf:  # else its list is shorter than the longest
            arrivals.append((time, node, lists[node][1][column], lists[node][0][column]))
    return arrivals


def draw_candidates(search: Search, count: int, weights_of: Callable[[int], Tensor]) -> list[Draw]:
    """Draw up to ``count`` successors of the live beams without replacement, in order.

    A successor's weight is exp(score of its beam + its processed log-probability). The listed successors have arrival
    times. The others, which no drafter lists, arrive as one Poisson process. Its waiting time is exponential with their
    total weight as rate, and a draw by weight picks one of them.

    Args:
        search: whose beams have listed successors.
        count: number of draws.
        weights_of: returns exp of the processed log-probabilities of all successors of a node, [V] fp64; called only
            for a draw that is not listed.
    """
    nodes, scores = zip(*search.live)
    text_hashes, lists = [search.text_hashes[node] for node in nodes], [search.likely(node) for node in nodes]
    highest = max(scores)
    drawn = first_arrivals(text_hashes, [score - highest for score in scores], lists, count)

    generator = torch.Generator().manual_seed(hash(tuple(text_hashes)))
    shares = torch.tensor(scores, dtype=torch.double).sub(highest).exp()
    rates = shares * torch.tensor([search.successors[node].rest for node in nodes])
    others: dict[int, Tensor] = {}  # weights of a beam's successors that are not listed
    waited = 0.0
    while (total := float(rates.sum())) > 0.0:
        waited += float(torch.empty((), dtype=torch.double).exponential_(total, generator=generator))
        if len(drawn) >= count and math.log(waited) >= drawn[count - 1][0]:
            break
        beam = int(torch.multinomial(rates, 1, generator=generator))
        if beam not in others:
            others[beam] = weights_of(nodes[beam])
            others[beam][lists[beam][1]] = 0.0
        weights = others[beam]
        if weights.any():  # else the rate was a rounding error
            token = int(torch.multinomial(weights, 1, generator=generator))
            insort(drawn, (math.log(waited), beam, token, float(weights[token].log())))
            weights[token] = 0.0
        rates[beam] = shares[beam] * weights.sum()
    return [(scores[beam] + value, beam, token) for _, beam, token, value in drawn[:count]]


@lru_cache(maxsize=64)
def _log_exponentials(size: int) -> Tensor:
    """ln of independent exponentials, [races, size] fp64, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.empty(size, RACES, dtype=torch.double).exponential_(generator=generator).log().T.contiguous()


def width_probabilities(
    scores: Sequence[float],
    target: Sequence[Successors],
    drafter: Sequence[Successors],
    width: int,
    breadth: int,
    per_beam: int,
    ends: Collection[int] = (),
) -> list[float]:
    """Return the probability that all beams of a step of width n are drafted, for n from 1 to ``width``.

    Args:
        scores: ln of the weights of the live beams.
        target: the target's likely successors of each beam.
        drafter: the drafter's likely successors of each beam.
        width: W, most beams.
        breadth: number of drafted nodes.
        per_beam: K; a step of width n draws K·n candidates.
        ends: tokens that end an answer; they need no node.
    """
    highest = max(scores)
    (of_target, of_drafter), continues = _aligned([score - highest for score in scores], target, drafter, ends)
    size = len(continues)
    log_e = _log_exponentials(size)
    drawn = min(per_beam * width, size)

    # nodes as chosen by Planner: of the candidates that arrive first by the drafter's weights, the likeliest
    first = (log_e - of_drafter).topk(drawn, largest=False).indices
    best = of_drafter[first].masked_fill(~continues[first], -math.inf).topk(min(breadth, drawn))
    drafted = torch.zeros(log_e.shape, dtype=torch.bool)
    drafted.scatter_(1, first.gather(1, best.indices), best.values > -math.inf)

    arrived = (log_e - of_target).topk(drawn, largest=False).indices
    ranked = of_target[arrived].masked_fill(~continues[arrived], -math.inf)
    ready = drafted.gather(1, arrived) | (ranked == -math.inf)
    probs = []
    for n in range(1, width + 1):
        kept = ranked[:, : per_beam * n].topk(min(n, drawn)).indices
        probs.append(float(ready.gather(1, kept).all(1).double().mean()))
    return probs


def dynamic_width(probs: Sequence[float], confidence: float, fewest: int) -> int:
    """Return max(fewest, largest n whose probability is at least ``confidence``)."""
    return max([fewest, *(n for n, prob in enumerate(probs, 1) if prob >= confidence)])


def _aligned(
    scores: Sequence[float], target: Sequence[Successors], drafter: Sequence[Successors], ends: Collection[int]
) -> tuple[Tensor, Tensor]:
    """Return scores [2, beams · C] of the candidates by target and drafter (-inf if not listed), and which continue."""
    tokens = [list(dict.fromkeys([*likely[1], *guess[1]])) for likely, guess in zip(target, drafter)]
    most = max(map(len, tokens))
    rows = []
    for lists in (target, drafter):
        for score, (values, own), union in zip(scores, lists, tokens):
            value_of = dict(zip(own, values))
            rows.append([score + value_of.get(token, -math.inf) for token in union] + [-math.inf] * (most - len(union)))
    continues = [[token not in ends for token in union] + [False] * (most - len(union)) for union in tokens]
    return torch.tensor(rows, dtype=torch.double).view(2, -1), torch.tensor(continues).flatten()
