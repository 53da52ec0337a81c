"""The draft tree with the most expected tokens per second, given what forwards and drafting cost on a device.

C(n) are the seconds of a target forward over n nodes, what the rule adds per node included; D(w) those of one depth
of drafting at width w. Large trees met in typical contexts, with scores s (cumulative log q), show what smaller trees
of the same contexts would yield:

    tokens = 1 + r · Σ exp(s) over the nodes - 1 best candidates

with r = drafts accepted / drafts expected, which corrects a drafter that is too sure or too modest. Drafting stops
early where the chance that the answer runs through one of the nodes to be expanded, Σ exp(s) over them, is below
``stop_below``. So each context has a depth of its own, and a shape takes

    Σ over contexts of tokens / Σ over contexts of (C(nodes) + fixed + its depth · D(width))

tokens per second. The shape with the most is taken.

B rows share a forward, which then has B times as many nodes, and a depth of drafting. So larger batches want smaller
trees, and above some size none at all: a shape is chosen for each of :data:`BATCHES`, with C(B · n) + (B - 1) · R, and
with drafting measured at batch 1 and at batch 8 and taken to be linear in between and beyond. R is what a row adds by
its own context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from fsd_infer.drafters.eagle import TreeShape
from fsd_infer.drafters.visits import visit_scores

DEPTHS = tuple(range(1, 11))
STOPS = tuple(tenth / 10 for tenth in range(10))
BATCHES = (1, 2, 4, 8, 16, 32)
WIDE = 8  # rows of the batch that is measured besides
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of drafts, at which visits are computed


@dataclass
class Costs:
    """Seconds on one device.

    Attributes:
        forward: target forward by number of nodes, the rule included.
        level: one depth of drafting by width.
        fixed: what drafting costs per round besides, reading the accepted tokens above all.
        wide_level, wide_fixed: the same for a batch of :data:`WIDE` rows.
        row: what a further row of a batch adds to a forward besides its nodes: it has a context of its own.
    """

    forward: Mapping[int, float]
    level: Mapping[int, float]
    fixed: float
    wide_level: Mapping[int, float] = field(default_factory=dict)
    wide_fixed: float = 0.0
    row: float = 0.0

    def for_batch(self, batch: int) -> Costs:
        """Of a batch's round, by the nodes and the width of each row."""
        if batch == 1:
            return self
        share = (batch - 1) / (WIDE - 1)
        rows = (batch - 1) * self.row
        forward = {n: between(self.forward, batch * n) + rows for n in range(1, max(self.forward) // batch + 1)}
        level = {w: alone + share * (self.wide_level[w] - alone) for w, alone in self.level.items()}
        return Costs(forward, level, self.fixed + share * (self.wide_fixed - self.fixed))

    def round(self, nodes: int, width: int, depth: int) -> float:
        """Seconds of a round that drafts so deep."""
        return between(self.forward, nodes) + self.fixed + depth * between(self.level, width)


@dataclass
class Candidates:
    """One context's large tree: scores and parents of its N nodes, the root first; and the tilt of the law."""

    scores: Sequence[float]
    parents: Sequence[int]
    tilt: float = 0.0

    def growth(self, width: int) -> list[Grown]:
        """The smaller trees of this width, depth by depth from 1 to :data:`DEPTHS`' last."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(self.parents)):
            children.setdefault(self.parents[node], []).append(node)
        frontier, found, grown = [0], [], []
        reached = {0: 1.0}  # chance that a law visits a node whose tilt looks no further than at the node itself
        for _ in DEPTHS:
            level: list[int] = []
            for node in frontier:
                best = sorted(children.get(node, []), key=lambda child: -self.scores[child])[:width]
                chances = [math.exp(self.scores[child] - self.scores[node]) for child in best]
                others = 1 + math.expm1(self.tilt) * sum(chances)
                reached.update({c: reached[node] * math.exp(self.tilt) * q / others for c, q in zip(best, chances)})
                level += best
            found += level
            frontier = sorted(level, key=lambda node: -self.scores[node])[:width]
            grown.append(Grown(self._expected(found), sum(reached[node] for node in frontier)))
        return grown

    def _expected(self, nodes: Sequence[int]) -> list[float]:
        """Drafts that are visited on average in trees of the n best of these nodes, n = 0, 1, ..."""
        if not self.tilt:
            return list(accumulate(sorted((math.exp(self.scores[node]) for node in nodes), reverse=True), initial=0.0))
        visits = self.visits([0, *sorted(nodes)])
        best = sorted(visits, key=lambda node: -visits[node])[1:]
        counts = [*(n for n in COUNTS if n < len(best)), len(best)]  # each asks for a tree of its own
        drafts = {n: sum(self.visits([0, *sorted(best[:n])]).values()) - 1.0 for n in counts}
        return [between(drafts, n) for n in range(len(best) + 1)]

    def visits(self, nodes: Sequence[int] | None = None) -> dict[int, float]:
        """The chances with which these nodes (None: all), the root first, are visited where no others are drafted."""
        nodes = range(len(self.parents)) if nodes is None else nodes
        place = {node: index for index, node in enumerate(nodes)}
        parents = [place[self.parents[node]] for node in nodes]
        logs = visit_scores([self.scores[node] for node in nodes], parents, self.tilt)
        return {node: math.exp(log - logs[0]) for node, log in zip(nodes, logs)}


@dataclass
class Grown:
    """A context's tree of some depth and width.

    Attributes:
        expected: entry n is how many of the n best drafts are visited on average, n = 0, 1, ...
        reach: the chance that one of the nodes is visited that would be expanded next.
    """

    expected: list[float]
    reach: float


def rate(costs: Costs, contexts: Sequence[Sequence[Grown]], shape: TreeShape, correction: float = 1.0) -> float:
    """Expected tokens per second.

    Args:
        costs: of this device.
        contexts: how trees of the shape's width grow in typical contexts.
        shape: of the tree.
        correction: r, drafts accepted / drafts expected.
    """
    tokens = seconds = 0.0
    for grown in contexts:
        depth = 1
        while depth < shape.depth and grown[depth - 1].reach >= shape.stop_below:
            depth += 1
        expected = grown[depth - 1].expected
        drafts = min(shape.nodes, len(expected)) - 1
        tokens += 1 + correction * expected[drafts]
        seconds += costs.round(1 + drafts, shape.width, depth)
    return tokens / seconds


def best_shape(
    costs: Costs, contexts: Sequence[Candidates], correction: float = 1.0, stops: Sequence[float] = STOPS
) -> TreeShape:
    """The shape with the highest :func:`rate`: measured widths, any number of nodes between measured ones.

    Args:
        costs: of this device.
        contexts: large trees of typical contexts, at least one.
        correction: r, drafts accepted / drafts expected.
        stops: values of ``stop_below`` to choose from.
    """
    best: tuple[float, TreeShape] | None = None
    most = min(max(costs.forward), max(len(context.scores) for context in contexts))
    for width in costs.level:
        grown = [context.growth(width) for context in contexts]
        for depth in DEPTHS:
            largest = min(most, 1 + TreeShape(depth, width, 2).candidates)
            for nodes in range(depth + 1, largest + 1):
                for stop in stops if depth > 1 else (0.0,):
                    shape = TreeShape(depth, width, nodes, stop)
                    found = rate(costs, grown, shape, correction)
                    if best is None or found > best[0]:
                        best = found, shape
    assert best is not None, "two nodes were not measured"
    return best[1]


def best_by_batch(
    costs: Costs, contexts: Sequence[Candidates], correction: float = 1.0, stops: Sequence[float] = STOPS
) -> dict[int, TreeShape | None]:
    """The best shape for each of :data:`BATCHES`, None where decoding without drafts is faster.

    Batch 1 always drafts. In larger ones drafting goes on until no row gains by it, so it is not stopped early.
    """
    shapes: dict[int, TreeShape | None] = {1: best_shape(costs, contexts, correction, stops)}
    for batch in BATCHES[1:]:
        shapes[batch] = None
        shared = costs.for_batch(batch)
        if max(shared.forward, default=0) < 2 or shapes[batch // 2] is None:  # what did not pay will not pay
            continue
        shape = best_shape(shared, contexts, correction, (0.0,))
        grown = [context.growth(shape.width) for context in contexts]
        if rate(shared, grown, shape, correction) > 1 / shared.forward[1]:
            shapes[batch] = shape
    return shapes


def between(points: Mapping[int, float], x: int) -> float:
    """Linear interpolation in points, which x does not leave."""
    below = max(point for point in points if point <= x)
    above = min(point for point in points if point >= x)
    share = (x - below) / (above - below) if above > below else 0.0
    return points[below] + share * (points[above] - points[below])
