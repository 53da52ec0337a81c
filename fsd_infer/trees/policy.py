"""Choose the draft tree of every round on a CPU: ``tree="auto"``.

A policy chooses a shape before each round and learns from the round after it. Drafters only see the shape. A shape of
``auto`` carries prices (:mod:`fsd_infer.trees.prices`), by which the drafter grows its tree, and which follow from what
earlier rounds took and accepted (:mod:`fsd_infer.trees.estimates`).

**Distributions stay.** A round's tree depends on the text, and on what earlier rounds took and accepted. The round's
random draws are independent of all that. So, given the past, a round emits by the rule's distribution on any tree. By
the chain rule, so does the whole text. Timing can change *which* draws give which token. A request with a seed
therefore reads no clock and learns nothing, and its answer repeats.

**Chains drawn from q** (`exact` with a small LM) are chosen in length only. Whether a draft x is drawn depends on the
drafts before it, on the draws of other rows and on the past. It never depends on x, and every drawn draft is verified.
So, given the context and all earlier draws, one of two cases holds. Either x ~ q, and the rule's test of x gives its
distribution. Or no x is drawn, and the target's own token has the same distribution. Hence the mixture has it too.
Dropping drafts with a small q(x) would break this: the test would see likely x only, and the distribution would shift
towards them. Trees with drawn nodes keep to the same principle (:mod:`fsd_infer.drafters.drawing`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fsd_infer.targets.target import Target
from fsd_infer.trees.calibration import DraftKind
from fsd_infer.trees.costs import prior_for
from fsd_infer.trees.estimates import PolicyStore, RuleProfile
from fsd_infer.trees.priced_growth import UNLIKELY, PricedGrowth
from fsd_infer.trees.prices import KNOTS, Prices
from fsd_infer.trees.shape import TreeShape

RATE_WINDOW, GAIN_WINDOW = 20, 15  # rounds of a text
TRIALS, MIN_TRIALS = 12, 4  # first rounds of one row, and of any batch; every other one drafts unconditionally
RECENT, USUAL = 5, 8  # trees whose median size is typical, and the size before any
MAX_MIN_ACCEPT_PROB = 0.25


@dataclass
class TreeStats:
    """Totals over trees that were chosen round by round.

    Attributes:
        nodes: size of one row's tree in every round, the root included.
        tokens: emitted.
        expected_tokens: expected before verification.
        seconds: that the rounds took.
        expected_seconds: expected before verification; 0 if no clock is read.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: float = 0.0
    expected_tokens: float = 0.0
    seconds: float = 0.0
    expected_seconds: float = 0.0

    def add(self, other: TreeStats) -> None:
        """Add the totals of ``other``."""
        self.nodes += other.nodes
        for name in ("tokens", "expected_tokens", "seconds", "expected_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """Return a record, with ``nodes`` as the number of rounds by tree size."""
        return {**asdict(self), "nodes": {str(nodes): count for nodes, count in sorted(Counter(self.nodes).items())}}


class RoundSeconds(NamedTuple):
    """What a round took.

    Attributes:
        draft: time of drafting.
        forward: time of the target's forward.
        rest: time of the rest; None if a row ended, so that the rest is not typical.
    """

    draft: float = 0.0
    forward: float = 0.0
    rest: float | None = 0.0


class TreeReport(NamedTuple):
    """What a policy learns from a round.

    Attributes:
        shape: shape of the round's trees.
        accepted: number of accepted drafts of each row.
        unfinished: the rows whose texts go on.
        forecasts: each row's, see :func:`.trees.shape.forecast`; NaN: not known; empty: the drafter makes none.
        growth: how the trees were grown; None: they were not grown by prices.
        paths: nodes of each row's accepted path, the root first.
        is_cut: whether a path ended before the rule refused a draft.
        seconds: what the round took; None: no clock is read.
    """

    shape: TreeShape
    accepted: Sequence[int]
    unfinished: Sequence[int] = (0,)
    forecasts: Sequence[Sequence[float]] = ()
    growth: PricedGrowth | None = None
    paths: Sequence[Sequence[int]] = ()
    is_cut: bool = False
    seconds: RoundSeconds | None = None


class TreePolicy(ABC):
    """Chooses the shape of every round's trees, and learns from the rounds.

    Attributes:
        menu: the shapes that it chooses among by forecasts, which the drafter has to make; empty: any shapes.
        clock: returns seconds, by which rounds and their parts are timed as they run; None: nothing may be timed.
        is_timed: whether :meth:`time` was called for batches of this size.
        stats: totals over the rounds so far.
    """

    menu: Sequence[TreeShape] = ()
    clock: Callable[[], float] | None = None
    is_timed: bool = False
    stats: TreeStats

    @abstractmethod
    def choose(self, rows: int) -> TreeShape:
        """Return the shape of the next trees of ``rows`` texts. Asking again changes nothing."""

    @abstractmethod
    def update(self, report: TreeReport) -> None:
        """Learn from a round."""

    def time(self, seconds: Sequence[float]) -> None:
        """Take the seconds of a round of each shape of the menu, timed when they were recorded."""
        self.is_timed = True


class PricePolicy(TreePolicy):
    """Chooses the prices by which trees grow, for the most tokens per second.

    Args:
        store: estimates of the drafter's requests.
        rows: number of rows of the request.
        profile: how drafts are verified.
        largest: the largest shape of a tree.
        learns: False: read no clock and keep nothing, so that trees are a function of only the text.
    """

    def __init__(
        self, store: PolicyStore, rows: int, profile: RuleProfile, largest: TreeShape, learns: bool = True
    ) -> None:
        self.store, self.profile, self.largest, self.learns = store, profile, largest, learns
        self.clock = store.clock if learns else None
        self.state = store.state_of(rows, profile, learns)
        self.state.calibration.begin_text()
        self.stats, self.rows = TreeStats(), 0

    def _begin(self, rows: int) -> None:
        """Begin rounds of ``rows`` rows."""
        self.rows = rows
        if self.learns:
            self.state = self.store.state_of(rows, self.profile)
        self.rate = self.state.rate.with_window(RATE_WINDOW)
        self.gain = self.state.gain.with_window(GAIN_WINDOW)

    @property
    def _in_trials(self) -> bool:
        return self.state.trials < max(TRIALS // self.rows, MIN_TRIALS)

    @property
    def _is_trial(self) -> bool:
        """Whether the next round drafts unconditionally: in trials every other one does, others show a plain one."""
        return self._in_trials and self.state.trials % 2 == 0

    def _max_loss(self, rows: int) -> float:
        """Return how many tokens drafting may be expected to lose in the next round."""
        if not self._in_trials:
            return self.state.pause.max_loss(rows)
        if self._is_trial:
            return math.inf
        return -math.inf if self.learns else 0.0

    def choose(self, rows: int) -> TreeShape:
        if rows != self.rows:
            self._begin(rows)
        state, costs, rate = self.state, self.state.costs, self.rate.value
        verify_prices = tuple(rate * slope for slope in costs.forward_slopes.weights)
        sizes = sorted(self.stats.nodes[-RECENT:] or [USUAL])
        # the interval of recent trees; a second node may be nearly free, and a drawn one is rarely the only one
        typical = bisect_left(KNOTS, max(sizes[len(sizes) // 2] * rows, 3)) - 1
        of_depth, of_node = costs.draft_slopes.weights
        prices = Prices(
            state.calibration,
            verify_prices,
            depth_price=rate * of_depth,
            expand_price=rate * of_node,
            accept_rate=state.accept_rate.value,
            reach_ratio=state.reach_ratio.value,
            draft_price=rate * (costs.reading + state.draft_cost.value),
            expected_gain=self.gain.value,
            max_loss=self._max_loss(rows),
            min_accept_prob=min(max(verify_prices[typical], UNLIKELY), MAX_MIN_ACCEPT_PROB),
            min_nodes=1 + self._is_trial,
            uncovered=(1.0,) * rows,
            was_plain=state.pause.rounds > 0,
            asks_grafted=not self.learns or state.graft.asks(rate),
        )
        return replace(self.largest, prices=prices)

    def update(self, report: TreeReport) -> None:
        state, growth = self.state, report.growth
        if growth is None:
            return
        resumed = bool(growth.drafted) and state.pause.rounds > 0  # the drafter first read the text of the pause
        if growth.drafted is not None:
            in_trials = self._in_trials
            state.trials += in_trials
            state.pause.note(growth.drafted, growth.prices.loss, counts=not in_trials)
        if growth.asked_grafted is not None and self.learns:
            state.graft.note(growth.asked_grafted, self.rate.value)
        if growth.is_choice and report.unfinished and not report.is_cut:
            self._learn(report, growth, resumed)

    def _learn(self, report: TreeReport, growth: PricedGrowth, resumed: bool) -> None:
        """Update all estimates. ``resumed``: the drafter read more than the last round's tokens."""
        costs, rows = self.state.costs, self.rows
        size = max(map(len, growth.steps), default=1)  # nodes of a row's tree
        nodes, reads = size * rows, self.state.pause.rounds == 0
        verifying = costs.forward(nodes)
        cost = verifying + costs.drafting(growth.depths, growth.expanded) + costs.rest(reads)
        gain = growth.expected - self.rate.value * (verifying - costs.forward(rows)) - growth.prices.grafted_gain
        self._learn_rate(report, growth, size, cost)
        if not resumed:
            draft, forward, rest = report.seconds or RoundSeconds()  # grafted drafters count to the rest
            rest = None if rest is None else rest + growth.grafted_seconds
            seconds = draft - growth.grafted_seconds, forward, rest
            costs.learn(nodes, growth.depths, growth.expanded, reads, seconds)
        if growth.depths:
            self._learn_gain(growth, gain)
            self._learn_acceptance(growth, report.accepted)
        grafted, accepted = self._learn_calibration(report, growth)
        if growth.asked_grafted and self.learns and costs.seconds_per_forward is not None:
            self.state.graft.learn(growth.grafted_seconds, nodes, grafted, accepted)

    def _learn_rate(self, report: TreeReport, growth: PricedGrowth, size: int, cost: float) -> None:
        """Learn the tokens per unit of cost, and add the round to the totals.

        Args:
            report: report of the round.
            growth: how its trees were grown.
            size: nodes of a row's tree.
            cost: expected cost of the round.
        """
        tokens, expected_tokens = float(sum(report.accepted) + self.rows), self.rows + growth.expected
        seconds = sum(part or 0.0 for part in report.seconds or RoundSeconds())
        expected_seconds = cost * (self.state.costs.seconds_per_forward or 0.0)
        self.stats.add(TreeStats([size], tokens, expected_tokens, seconds, expected_seconds))
        for rate in (self.rate, self.state.rate):
            rate.learn(tokens, cost)

    def _learn_gain(self, growth: PricedGrowth, gain: float) -> None:
        """Learn what a round that drafts gains and costs.

        Drawn drafts are verified whatever they cost, and trees of trials need not pay; others are as large as pays.
        """
        is_chosen = growth.prices.min_nodes == 1
        for average in (self.gain, self.state.gain):
            average.learn(gain if is_chosen else max(gain, 0.0), sum(growth.prices.uncovered))
        self.state.draft_cost.learn(self.state.costs.drafting(growth.depths, growth.expanded), 1.0)

    def _learn_acceptance(self, growth: PricedGrowth, accepted: Sequence[int]) -> None:
        """Learn how many rows reach expanded nodes, and how many accept a child there. ``accepted``: drafts per row."""
        for depth, expected in enumerate(growth.expected_rows):
            reached, went_on = (
                sum(count >= reached_depth for count in accepted) for reached_depth in (depth, depth + 1)
            )
            self.state.accept_rate.learn(went_on, reached)
            if depth:
                self.state.reach_ratio.learn(reached, expected)

    def _learn_calibration(self, report: TreeReport, growth: PricedGrowth) -> tuple[int, int]:
        """Learn of each draft. Return how many drafts of all rows were grafted, and how many of these were accepted."""
        grafted = accepted = 0
        for steps, path, count in zip(growth.steps, report.paths, report.accepted):
            depth_of = dict(zip(path[: count + 1], range(count + 1)))  # depths of the nodes on the accepted path
            grafted += sum(step.kind is DraftKind.GRAFTED for step in steps)
            accepted += sum(step.kind is DraftKind.GRAFTED and node in depth_of for node, step in enumerate(steps))
            for node, step in enumerate(steps[1:], 1):
                if step.parent in depth_of:
                    depth = depth_of[step.parent] + 1
                    self.state.calibration.learn(step.log_q, depth, step.first, step.kind, node in depth_of)
        return grafted, accepted


_STORES: WeakKeyDictionary[object, PolicyStore] = WeakKeyDictionary()


def policy_store(learner: object, target: Target, relative_cost: float | None) -> PolicyStore:
    """Return the estimates of a drafter's requests, which are kept as long as the drafter.

    Args:
        learner: the drafter, or the part of it that learns.
        target: verifies its drafts.
        relative_cost: see :class:`.Drafter`.
    """
    if learner not in _STORES:
        _STORES[learner] = PolicyStore(prior_for(target, relative_cost))
    return _STORES[learner]
