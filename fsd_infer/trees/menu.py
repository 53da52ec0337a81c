"""Choose each round's tree among a few fixed shapes: ``tree="auto"`` where rounds are recorded.

A recording fixes the shape of its tree, and nothing of a round may be read on the host before the next one begins. So
a round itself forecasts, for every shape of the menu, how many drafts a walk would accept
(:mod:`fsd_infer.trees.forecast`). The round's report brings the forecasts to the host, with the drafts that were
accepted. A :class:`MenuPolicy` corrects the one by the other and chooses the shape with the most

    tokens - rate · cost,    rate = tokens per unit of cost so far,

as :mod:`fsd_infer.trees.prices` explains. What a round of each shape takes is timed once, when the shapes are recorded;
before, and for a request with a seed, a prior stands for it.

A choice depends on earlier rounds alone, so distributions stay as in :mod:`fsd_infer.trees.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from fsd_infer.trees.costs import CostModel
from fsd_infer.trees.estimates import PolicyState, Rate, RuleProfile, TreeMemory
from fsd_infer.trees.policy import GAIN_MEMORY, RATE_MEMORY, TreeStats
from fsd_infer.trees.shape import NO_TREE, TreeShape

TEXT, SHAPE = 40.0, 200.0  # expected acceptances after which a ratio of the text, or of a shape, has faded to 1/e
RECENT = 3  # rounds over which forecasts are averaged
SURVIVAL = 0.6  # of a draft, before anything was forecast


def menu_of(shapes: Sequence[TreeShape], chains: bool) -> tuple[TreeShape, ...]:
    """Return the menu of a request from that of its drafter. ``chains``: drafts are drawn, one below the other."""
    if chains:
        shapes = [shape if shape == NO_TREE else TreeShape.chain(shape.depth) for shape in shapes]
    return tuple(dict.fromkeys(shapes))


class MenuPolicy:
    """Chooses the shape of every round's trees among those of a menu.

    Args:
        memory: of the drafter.
        rows: of the request.
        profile: how drafts are verified.
        menu: the shapes.
        learns: False: keep nothing and time nothing, so that trees are a function of the text alone.

    Attributes:
        clock: returns seconds.
        stats: totals over the rounds so far.
        timed: whether :meth:`time` was called.
    """

    def __init__(
        self, memory: TreeMemory, rows: int, profile: RuleProfile, menu: Sequence[TreeShape], learns: bool = True
    ) -> None:
        self.menu, self.learns, self.clock = tuple(menu), learns, memory.clock
        self.state = memory.state_of(rows, profile) if learns else PolicyState(CostModel(memory.prior), rows, profile)
        costs = self.state.costs
        self.costs = [
            costs.forward(shape.max_nodes * rows)
            + costs.drafting(shape.depth, (1 + (shape.depth - 1) * shape.width) * rows if shape.depth else 0)
            + costs.rest(True)
            for shape in self.menu
        ]
        self.rate = self.state.rate.recent(RATE_MEMORY)
        self.ratio = Rate(1.0, 1.0, TEXT)  # accepted drafts of this text per expected one
        self.expected = [self._usual(shape).value for shape in self.menu]  # drafts of a row, by shape
        self.stats = TreeStats()
        self.timed = False

    def _usual(self, shape: TreeShape) -> Rate:
        """Return the drafts that earlier rounds expected of a shape, per row."""
        prior = sum(SURVIVAL**depth for depth in range(1, shape.depth + 1))
        return self.state.usual.setdefault(shape, Rate(prior, 1.0, GAIN_MEMORY))

    def _of_shape(self, shape: TreeShape) -> Rate:
        """Return how many drafts are accepted per expected one, by trees of a shape."""
        return self.state.ratios.setdefault(shape, Rate(1.0, 1.0, SHAPE))

    def time(self, seconds: Sequence[float]) -> None:
        """Take the seconds of a round of each shape, timed when they were recorded."""
        self.timed = True
        if self.learns:
            self.costs = [each / max(min(seconds), 1e-9) for each in seconds]

    def _tokens(self, place: int) -> float:
        """Return the drafts that a row is expected to accept in a tree of the place-th shape."""
        return self.expected[place] * self._of_shape(self.menu[place]).value * self.ratio.value

    def _values(self, rows: int) -> list[float]:
        """Return tokens less their price, by shape."""
        return [rows * (1.0 + self._tokens(at)) - self.rate.value * cost for at, cost in enumerate(self.costs)]

    def choose(self, rows: int) -> TreeShape:
        """Return the shape of the next trees of ``rows`` texts."""
        values = self._values(rows)
        best = max(range(len(values)), key=values.__getitem__)
        if self.menu[best] == NO_TREE and len(values) > 1:  # attempt again after a while
            second = max((at for at in range(len(values)) if at != best), key=values.__getitem__)
            if values[best] - values[second] <= self.state.pause.max_loss(rows):
                return self.menu[second]
        return self.menu[best]

    def update(self, shape: TreeShape, forecasts: Sequence[Sequence[float]], accepted: Sequence[int]) -> None:
        """Learn from a round.

        Args:
            shape: of its trees.
            forecasts: as of :func:`forecast`, of each row that goes on; NaN: not known.
            accepted: number of their accepted drafts.
        """
        place, rows = self.menu.index(shape), len(accepted)
        values, tokens = self._values(rows), float(sum(accepted) + rows)
        loss = 0.0 if NO_TREE not in self.menu else values[self.menu.index(NO_TREE)] - values[place]
        self.state.pause.note(shape != NO_TREE, loss)
        cost = self.costs[place]
        self.stats.add(TreeStats([shape.max_nodes], tokens, rows * (1.0 + self._tokens(place))))
        for rate in (self.rate, self.state.rate):
            rate.learn(tokens, cost)
        known = [(row, count) for row, count in zip(forecasts, accepted) if not math.isnan(row[0])]
        if not known or shape == NO_TREE:  # what is expected of this text is forgotten
            self._expect([self._usual(one).value for one in self.menu], 2 * GAIN_MEMORY)
            return
        made = [fmean(x) for x in zip(*(self._extended(shape, row) for row, _ in known))]
        expected, right = len(known) * made[place], sum(count for _, count in known)
        self.ratio.learn(right, expected * self._of_shape(shape).value)
        self._of_shape(shape).learn(right, expected)
        for one, value in zip(self.menu, made):
            self._usual(one).learn(value, 1.0)
        self._expect(made, RECENT)

    def _expect(self, values: Sequence[float], memory: float) -> None:
        self.expected = [before + (now - before) / memory for before, now in zip(self.expected, values)]

    def _extended(self, shape: TreeShape, row: Sequence[float]) -> list[float]:
        """Return the forecasts of a row with what deeper shapes add: as many drafts survive a depth as did so far."""
        reach = min(max(row[-1], 0.0), 1.0)
        step = reach ** (1.0 / shape.depth)
        more = [reach * sum(step**depth for depth in range(1, one.depth - shape.depth + 1)) for one in self.menu]
        return [value + extra for value, extra in zip(row, more)]
