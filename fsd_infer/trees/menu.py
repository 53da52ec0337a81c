"""Choose each round's tree among a few fixed shapes: ``tree="auto"`` where rounds are recorded.

A recording fixes the shape of its tree, and nothing of a round may be read on the host before the next one begins. So
a round itself forecasts, for every shape of the menu, how many drafts a walk would accept
(:func:`fsd_infer.trees.shape.forecast`). The round's report brings the forecasts to the host, with the drafts that were
accepted. A :class:`MenuPolicy` corrects the one by the other and chooses the shape with the most

    tokens - rate · cost,    rate = tokens per unit of cost so far,

as :mod:`fsd_infer.trees.prices` explains. What a round of each shape takes is timed once, when the shapes are recorded;
before, and for a request with a seed, a prior stands for it.

A choice depends only on earlier rounds, so distributions stay as in :mod:`fsd_infer.trees.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from fsd_infer.trees.calibration import RunningRatio
from fsd_infer.trees.estimates import PolicyStore, RuleProfile
from fsd_infer.trees.policy import GAIN_WINDOW, RATE_WINDOW, TreePolicy, TreeReport, TreeStats
from fsd_infer.trees.shape import NO_TREE, TreeShape

TEXT_WINDOW, SHAPE_WINDOW = 40.0, 200.0  # of the ratios of a text and of a shape, in expected acceptances
RECENT = 3  # rounds over which forecasts are averaged
SURVIVAL = 0.6  # of a draft, before anything was forecast


def menu_of(shapes: Sequence[TreeShape], chains: bool) -> tuple[TreeShape, ...]:
    """Return the menu of a request from that of its drafter. ``chains``: drafts are drawn, one below the other."""
    if chains:
        shapes = [shape if shape == NO_TREE else TreeShape.chain(shape.depth) for shape in shapes]
    return tuple(dict.fromkeys(shapes))


class MenuPolicy(TreePolicy):
    """Chooses the shape of every round's trees among those of a menu.

    Args:
        store: estimates of the drafter's requests.
        rows: number of rows of the request.
        profile: how drafts are verified.
        menu: the shapes.
        learns: False: keep nothing and time nothing, so that trees are a function of only the text.
    """

    def __init__(
        self, store: PolicyStore, rows: int, profile: RuleProfile, menu: Sequence[TreeShape], learns: bool = True
    ) -> None:
        self.menu, self.learns = tuple(menu), learns
        self.state = store.state_of(rows, profile, learns)
        costs = self.state.costs
        self.costs = [
            costs.forward(shape.max_nodes * rows)
            + costs.drafting(shape.depth, (1 + (shape.depth - 1) * shape.width) * rows if shape.depth else 0)
            + costs.rest(True)
            for shape in self.menu
        ]
        self.rate = self.state.rate.with_window(RATE_WINDOW)
        self.ratio = RunningRatio(1.0, 1.0, TEXT_WINDOW)  # accepted drafts of this text per expected one
        self.expected = [self._usual_drafts(shape).value for shape in self.menu]  # drafts of a row, by shape
        self.stats = TreeStats()

    def _usual_drafts(self, shape: TreeShape) -> RunningRatio:
        """Return the drafts per row that earlier rounds expected of a shape."""
        prior = sum(SURVIVAL**depth for depth in range(1, shape.depth + 1))
        return self.state.usual_drafts.setdefault(shape, RunningRatio(prior, 1.0, GAIN_WINDOW))

    def _shape_ratio(self, shape: TreeShape) -> RunningRatio:
        """Return how many drafts are accepted per expected one, by trees of a shape."""
        return self.state.shape_ratios.setdefault(shape, RunningRatio(1.0, 1.0, SHAPE_WINDOW))

    def time(self, seconds: Sequence[float]) -> None:
        super().time(seconds)
        if self.learns:
            self.costs = [cost / max(min(seconds), 1e-9) for cost in seconds]

    def _expected_drafts(self, index: int) -> float:
        """Return the drafts that a row is expected to accept in a tree of that shape of the menu."""
        return self.expected[index] * self._shape_ratio(self.menu[index]).value * self.ratio.value

    def _values(self, rows: int) -> list[float]:
        """Return tokens less what they cost, by shape."""
        return [
            rows * (1.0 + self._expected_drafts(index)) - self.rate.value * cost
            for index, cost in enumerate(self.costs)
        ]

    def choose(self, rows: int) -> TreeShape:
        values = self._values(rows)
        best = max(range(len(values)), key=values.__getitem__)
        if self.menu[best] == NO_TREE and len(values) > 1:  # attempt again after a while
            second = max((index for index in range(len(values)) if index != best), key=values.__getitem__)
            if values[best] - values[second] <= self.state.pause.max_loss(rows):
                return self.menu[second]
        return self.menu[best]

    def update(self, report: TreeReport) -> None:
        shape, rows = report.shape, len(report.unfinished)
        if not rows:
            return
        index, accepted = self.menu.index(shape), [report.accepted[row] for row in report.unfinished]
        forecasts = [report.forecasts[row] for row in report.unfinished]
        values = self._values(rows)
        plain = values[self.menu.index(NO_TREE)] if NO_TREE in self.menu else -math.inf
        self.state.pause.note(shape != NO_TREE, plain - values[index])
        tokens, cost = float(sum(accepted) + rows), self.costs[index]
        self.stats.add(TreeStats([shape.max_nodes], tokens, rows * (1.0 + self._expected_drafts(index))))
        for rate in (self.rate, self.state.rate):
            rate.learn(tokens, cost)
        forecast = [(row, count) for row, count in zip(forecasts, accepted) if not math.isnan(row[0])]
        if not forecast or shape == NO_TREE:  # what is expected of this text is forgotten
            self._expect([self._usual_drafts(one).value for one in self.menu], 2 * GAIN_WINDOW)
        else:
            self._compare(shape, *zip(*forecast))

    def _compare(self, shape: TreeShape, forecasts: Sequence[Sequence[float]], accepted: Sequence[int]) -> None:
        """Learn from forecasts of a shape's rows and from the drafts that they accepted."""
        means = [fmean(values) for values in zip(*(self._extended(shape, row) for row in forecasts))]
        expected, ratio = len(forecasts) * means[self.menu.index(shape)], self._shape_ratio(shape)
        self.ratio.learn(sum(accepted), expected * ratio.value)
        ratio.learn(sum(accepted), expected)
        for one, mean in zip(self.menu, means):
            self._usual_drafts(one).learn(mean, 1.0)
        self._expect(means, RECENT)

    def _expect(self, values: Sequence[float], window: float) -> None:
        self.expected = [before + (now - before) / window for before, now in zip(self.expected, values)]

    def _extended(self, shape: TreeShape, row: Sequence[float]) -> list[float]:
        """Return the forecasts of a row with what deeper shapes add: as many drafts survive a depth as did so far."""
        to_end = min(max(row[-1], 0.0), 1.0)  # drafts at the shape's depth
        survival = to_end ** (1.0 / shape.depth)
        more = [to_end * sum(survival**depth for depth in range(1, one.depth - shape.depth + 1)) for one in self.menu]
        return [value + extra for value, extra in zip(row, more)]
