"""What a drafter's requests have learned about rounds, for ``tree="auto"``: estimates that are recursive and forget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from fsd_infer.trees.calibration import Calibration, RunningRatio
from fsd_infer.trees.costs import CostModel, CostPrior
from fsd_infer.trees.shape import TreeShape

# windows of running ratios
DEPTH_WINDOW, LONG_WINDOW = 40, 50  # rounds
GRAFT_WINDOW, GRAFT_TRIALS = 15, 4  # rounds, and the first ones, in which a grafted drafter is asked in any case
ATTEMPT, ATTEMPTS_SHARE = 2, 0.03  # rounds of an attempt after a pause; share of tokens that attempts may cost


class RuleProfile(NamedTuple):
    """How the drafts of a request are verified.

    Attributes:
        draft_bonus: nats that the distribution gives for an accepted draft, as in :class:`DraftRequest`.
        name: name of the rule, or "several". Requests with the same name and draft bonus share what they learn.
        sampled: whether the drafts are a chain sampled from q.
    """

    draft_bonus: float = 0.0
    name: str = ""
    sampled: bool = False


class Pause:
    """Leaves out what does not pay, and attempts it again after a while.

    A pause is long enough for an attempt to cost no more than ATTEMPTS_SHARE of the pause's tokens.

    Attributes:
        rounds: rounds of the present pause; 0 if there is none.
        attempt: rounds of the present attempt, which did not pay so far.
    """

    def __init__(self) -> None:
        self.rounds = self.attempt = 0

    def max_loss(self, batch: int) -> float:
        """Return how many tokens the next round may be expected to lose: more than 0 if it may attempt again."""
        return math.inf if 0 < self.attempt < ATTEMPT else ATTEMPTS_SHARE * self.rounds * batch / ATTEMPT

    def note(self, used: bool, loss: float, counts: bool = True) -> None:
        """Note whether a round used it, at this expected loss. ``counts``: a round without it is one of a pause."""
        self.attempt = self.attempt + 1 if used and loss > 0.0 else 0
        self.rounds = 0 if used else self.rounds + counts


class GraftWorth:
    """Whether it pays to ask a grafted drafter: the tokens of its drafts against its time and their verification."""

    def __init__(self, costs: CostModel, batch: int) -> None:
        self.costs, self.batch, self.pause, self.trials = costs, batch, Pause(), 0
        self.gain, self.cost = RunningRatio(0.2 * batch, 1.0, GRAFT_WINDOW), RunningRatio(0.02, 1.0, GRAFT_WINDOW)

    def _loss(self, rate: float) -> float:
        return rate * self.cost.value - self.gain.value

    def asks(self, rate: float) -> bool:
        """Return whether to ask it in the next round. ``rate``: tokens per forward over a single token."""
        return self.trials < GRAFT_TRIALS or self._loss(rate) <= self.pause.max_loss(self.batch)

    def note(self, asked: bool, rate: float) -> None:
        """Note whether a round asked it."""
        self.trials += 1
        self.pause.note(asked, self._loss(rate))

    def learn(self, seconds: float, nodes: int, grafted: int, accepted: int) -> None:
        """Learn from a round in which it was asked.

        Args:
            seconds: time of its drafting and of merging its drafts.
            nodes: verified nodes of all rows.
            grafted: its own among them.
            accepted: those that were accepted.
        """
        self.gain.learn(accepted, 1.0)
        verifying = self.costs.forward(nodes) - self.costs.forward(nodes - grafted)
        self.cost.learn(verifying + seconds / (self.costs.seconds_per_forward or 1.0), 1.0)


class PolicyState:
    """Estimates for one profile and one batch size.

    Attributes:
        costs: costs of rounds.
        calibration: calibration of the drafter's probabilities.
        rate: tokens per unit of cost.
        reach_ratio: rows that reached expanded nodes, per row that was expected to.
        accept_rate: rows that accepted a child of an expanded node, per row that reached one.
        gain: tokens that drafts are expected to add in a round, less the cost of their verification, per row, or per
            share of a row's tokens that other drafters miss.
        draft_cost: cost of drafting in a round that drafts.
        trials: rounds of the trial phase so far.
        pause: pauses of drafting.
        usual_drafts, shape_ratios: drafts that are expected of a row, and accepted ones per expected one, by shape
            (:mod:`fsd_infer.trees.menu`).
        graft: whether grafted drafters pay.
    """

    def __init__(self, costs: CostModel, batch: int, profile: RuleProfile) -> None:
        self.costs, self.calibration = costs, Calibration(profile.draft_bonus, profile.sampled)
        self.rate = RunningRatio(1.5 * batch, costs.forward(batch) + costs.rest(True), LONG_WINDOW)
        self.reach_ratio = RunningRatio(1.0, 1.0, DEPTH_WINDOW)
        self.accept_rate = RunningRatio(0.6, 1.0, DEPTH_WINDOW)
        self.gain = RunningRatio(1.0, 1.0, DEPTH_WINDOW)
        self.draft_cost = RunningRatio(costs.drafting(2, 2 * batch), 1.0, DEPTH_WINDOW)
        self.trials, self.pause, self.graft = 0, Pause(), GraftWorth(costs, batch)
        self.usual_drafts: dict[TreeShape, RunningRatio] = {}
        self.shape_ratios: dict[TreeShape, RunningRatio] = {}


class PolicyStore:
    """The estimates of a drafter's requests, by batch size and profile.

    Args:
        prior: assumed costs of a round.
        clock: returns seconds.
    """

    def __init__(self, prior: CostPrior, clock: Callable[[], float] = time.perf_counter) -> None:
        self.prior, self.clock = prior, clock
        self._costs: dict[int, CostModel] = {}
        self._states: dict[tuple[int, RuleProfile], PolicyState] = {}

    def state_of(self, batch: int, profile: RuleProfile, learns: bool = True) -> PolicyState:
        """Return the estimates of earlier requests with a similar batch and profile, which the caller updates in place.

        ``learns``: False: return new ones, which are not kept.
        """
        if not learns:
            return PolicyState(CostModel(self.prior), batch, profile)
        size = batch.bit_length()
        costs = self._costs.setdefault(size, CostModel(self.prior))
        key = size, profile._replace(draft_bonus=round(4 * min(profile.draft_bonus, 4.0)))
        if key not in self._states:
            self._states[key] = PolicyState(costs, batch, profile)
        return self._states[key]
