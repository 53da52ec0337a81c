"""Estimates behind ``tree="auto"``: what rounds cost and how often drafts are accepted, kept per drafter.

Every estimate is recursive and forgets. Known bounds hold throughout: more nodes never cost less, and drafting is never
free. A stall or a clock that jumps counts for little.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fsd_infer.drafters.shape import of_device
from fsd_infer.drafters.visits import MOST_TILT

if TYPE_CHECKING:
    from fsd_infer.targets.target import Target

KNOTS = (1, 6, 7, 12, 24, 48, 96)  # node counts between which C is linear; the last slope continues
NOISE, SAME_NOISE = 0.1, 0.3  # relative standard deviation of a measured cost, beside another one and alone
DOUBT = 0.8  # relative standard deviation of a prior slope
FORWARD_DOUBT = 0.04  # at least, of C's slopes: machines differ by more than their small ones
KINSHIP = 0.7  # correlation of these deviations, the first slope's excepted: slopes tend to be too high together
FORGET = 0.01  # share of the evidence that a round forgets
RECENT = 5  # rounds whose median gives the present speed of the machine
CERTAIN = 0.99  # upper bound of a draft's chance
BINS, LEAST = 20, -6.0  # of the calibration curve, equal in √(-ln q) down to ln q = LEAST: narrow where q is near 1
STARTING = 0.05  # fixed cost of a small LM's forward, in forwards of the target
TEXT_MEMORY, BIN_MEMORY = 40, 200  # drafts
DEPTH_MEMORY, LONG_MEMORY = 40, 50  # rounds
SIDE_MEMORY, SIDE_TRIALS = 15, 4  # rounds, and the first ones, in which a grafted drafter is asked in any case
ATTEMPT, ATTEMPTS_SHARE = 2, 0.03  # rounds of an attempt after a pause; share of tokens that attempts may cost


@dataclass(frozen=True)
class Prior:
    """Costs that are assumed before anything was timed, in forwards over a single token.

    Attributes:
        slopes: of C between KNOTS, per node.
        drafting: of a depth, and of an expanded node.
        rest: of everything else in a round, and of the drafter's reading of the accepted tokens.
    """

    slopes: tuple[float, ...]
    drafting: tuple[float, float]
    rest: tuple[float, float]

    def with_model(self, share: float) -> Prior:
        """Return the prior for a small LM whose forward takes ``share`` of the target's.

        The small LM reads the accepted tokens together with the root, in the forward of the first depth.
        """
        a_node = share * self.slopes[2]
        return Prior(self.slopes, (STARTING + share, max(a_node, 0.0005)), (self.rest[0], 0.01))

    def without_model(self) -> Prior:
        """Return the prior for a drafter without a model."""
        return Prior(self.slopes, (0.001, 0.0005), (self.rest[0], 0.01))


PRIORS = {
    # weights in blocks: a forward over one token is short, and more tokens are bound by arithmetic
    "blocks": Prior((0.07, 0.15, 0.15, *[0.165] * (len(KNOTS) - 3)), (0.13, 0.018), (0.09, 0.3)),
    # the same on AMX tiles: the built-in model takes 3.0 ms for one row, 5.2 for 4, 8.0 for 8 and 12.1 for 16
    "blocks on tiles": Prior((0.25, 0.3, 0.17, *[0.25] * (len(KNOTS) - 4)), (0.17, 0.02), (0.15, 0.15)),
    "cpu": Prior((0.01, 0.25, 0.05, *[0.09] * (len(KNOTS) - 3)), (0.06, 0.008), (0.04, 0.14)),
    "cuda": Prior((*[0.001] * 4, *[0.003] * (len(KNOTS) - 4)), (0.05, 0.0005), (0.03, 0.05)),
}


def prior_for(target: Target) -> Prior:
    """Return the costs of a round with a head that are assumed before anything was timed."""
    if target.has_blocks:
        return PRIORS["blocks on tiles" if target.kernels == "amx" else "blocks"]
    return of_device(PRIORS, target.device)


class Slopes:
    """Positive weights w of y ≈ w·x, by recursive least squares that forgets towards its prior.

    A residual counts for two standard deviations at most. So a stall of a second moves the weights no more than one
    slow round.

    Args:
        prior: weights before the first observation.
        least_doubt: least standard deviation of a prior weight.

    Attributes:
        weights: the present estimate.
    """

    def __init__(self, prior: Sequence[float], least_doubt: float = 0.0) -> None:
        self.weights = list(prior)
        self._least = [0.05 * value for value in prior]
        doubts = [max(DOUBT * value, least_doubt) for value in prior]
        self._prior = [
            [a * b * (1.0 if i == j else KINSHIP if i and j else 0.0) for j, b in enumerate(doubts)]
            for i, a in enumerate(doubts)
        ]
        self._covariance = [row[:] for row in self._prior]

    def predict(self, x: Sequence[float]) -> float:
        """Return w·x."""
        return sum(weight * value for weight, value in zip(self.weights, x))

    def learn(self, x: Sequence[float], y: float, noise: float) -> None:
        """Learn from one observation y with standard deviation ``noise``."""
        spread = [sum(entry * value for entry, value in zip(row, x)) for row in self._covariance]
        variance = sum(entry * value for entry, value in zip(spread, x)) + noise**2
        most = 2.0 * math.sqrt(variance)
        residual = min(max(y - self.predict(x), -most), most) / variance
        for i, (row, prior) in enumerate(zip(self._covariance, self._prior)):
            self.weights[i] = max(self.weights[i] + spread[i] * residual, self._least[i])
            share = spread[i] / variance
            for j, other in enumerate(spread):
                row[j] += FORGET * (prior[j] - row[j]) - share * other


class Costs:
    """Costs of rounds on this device, in forwards over a single token.

    Args:
        prior: costs before anything was timed.
    """

    def __init__(self, prior: Prior) -> None:
        self.forward_slopes = Slopes(prior.slopes, FORWARD_DOUBT)
        self.draft_slopes = Slopes(prior.drafting)
        self.rest_slopes = Slopes(prior.rest)
        self._paces: deque[float] = deque(maxlen=RECENT)
        self._before: tuple[int, float, bool] | None = None  # nodes and seconds of the last round; whether it was plain

    @property
    def pace(self) -> float | None:
        """Present seconds of a forward over a single token; None if nothing was timed."""
        return median(self._paces) if self._paces else None

    def forward(self, nodes: int) -> float:
        """Return C(N): the cost of verifying ``nodes`` nodes of all rows."""
        return 1.0 + self.forward_slopes.predict(_spans(nodes))

    def drafting(self, depths: int, expanded: int) -> float:
        """Return the cost of drafting ``depths`` depths with ``expanded`` expanded nodes over all rows."""
        return self.draft_slopes.predict((depths, expanded))

    @property
    def reading(self) -> float:
        """The cost of the drafter's reading of the accepted tokens."""
        return self.rest_slopes.weights[1]

    def rest(self, reads: bool) -> float:
        """Return the cost of everything else. ``reads``: whether the drafter reads the accepted tokens."""
        return self.rest_slopes.predict((1.0, float(reads)))

    def learn(
        self, nodes: int, forward: float, depths: int, expanded: int, draft: float, rest: float | None, reads: bool
    ) -> None:
        """Learn from one round. Ignore it if the clock was set back, or was not read.

        Args:
            nodes: verified nodes of all rows.
            forward: seconds of the target forward.
            depths: depths drafted.
            expanded: expanded nodes of all rows.
            draft: seconds of drafting.
            rest: seconds of everything else; None if unknown.
            reads: whether the drafter read the accepted tokens.
        """
        if min(forward, draft if depths else 1.0, 1.0 if rest is None else rest) <= 0.0:
            return
        expected = self.forward(nodes)
        own = forward / expected  # a busy machine slows all parts of a round alike
        self._paces.append(own)
        before, self._before = self._before, (nodes, forward, not depths)
        if before is not None and before[2] != (not depths):
            self._compare(*sorted((before[:2], (nodes, forward))))
        else:
            pace = median(self._paces)
            self.forward_slopes.learn(_spans(nodes), forward / pace - 1.0, SAME_NOISE * expected)
        if depths:
            expected = self.drafting(depths, expanded)
            self.draft_slopes.learn((depths, expanded), draft / own, 2 * NOISE * expected)
        if rest is not None:
            self.rest_slopes.learn((1.0, float(reads)), rest / own, 2 * NOISE * self.rest(reads))

    def _compare(self, plain: tuple[int, float], drafted: tuple[int, float]) -> None:
        """Learn from a round without drafts and one with drafts beside it, nodes and seconds each.

        Rounds alike say little of C: a slow machine and a large C look the same.
        """
        nodes, seconds = drafted
        pace = plain[1] / self.forward(plain[0])
        self.forward_slopes.learn(_spans(nodes), seconds / pace - 1.0, NOISE * self.forward(nodes))


def _spans(nodes: int) -> list[float]:
    """Return how many of ``nodes`` lie in each interval between KNOTS."""
    ends = (*KNOTS[1:], math.inf)
    return [max(min(nodes, end) - start, 0.0) for start, end in zip(KNOTS, ends)]


class Kind(IntEnum):
    """How a draft was proposed."""

    LIKELY = 0  # as one of the likeliest tokens of its drafter
    GRAFTED = 1  # by another drafter
    DRAWN = 2  # drawn from q


class Curve:
    """Calibration: the chance that a draft is accepted if its parent was, from the drafter's probability q.

        g(q) = r · q·e^t / (1 + q·(e^t - 1))

    Here t is the law's tilt, or 0 for all but the likeliest sibling. The ratio r is accepted drafts over expected ones.
    It is a product of two ratios, each with a weak prior of 1. One counts drafts of similar q, the same depth class (1,
    or more), the same rank class (first sibling, or not) and the same kind. The other counts the text's last drafts of
    the same kind: a text that a head drafts well may hold no copies, and the other way round.

    Under the exact test a draft sampled from q is accepted with probability min(1, p/q), however small q is. So where
    drafts are sampled, (1 + q)/2 replaces q.

    Args:
        tilt: t, in nats.
        sampled: whether drafts are sampled from q.
    """

    def __init__(self, tilt: float = 0.0, sampled: bool = False) -> None:
        self._gain, self._sampled = math.exp(min(tilt, MOST_TILT)) - 1.0, sampled
        bins = 4 * len(Kind) * BINS
        self._seen = [Rate(0.2, 0.2, BIN_MEMORY) for _ in range(bins)]
        self._ratios = [1.0] * bins
        self.begin_text()

    def begin_text(self) -> None:
        """Reset the ratios of the text's last drafts."""
        self._text = [Rate(0.5, 0.5, TEXT_MEMORY) for _ in Kind]

    def chance(self, log_q: float, depth: int, first: bool, kind: Kind = Kind.LIKELY) -> float:
        """Return g(q).

        Args:
            log_q: ln q of the draft, given its parent; for a drawn one what its tree says.
            depth: of the draft, from 1.
            first: whether the draft is the likeliest of its siblings.
            kind: how it was proposed.
        """
        if not self._counts(log_q):
            return 0.0
        ratio = self._ratios[self._bin(log_q, depth, first, kind)] * self._text[kind].value
        return min(self._expected(log_q, first) * ratio, CERTAIN)

    def learn(self, log_q: float, depth: int, first: bool, kind: Kind, accepted: bool) -> None:
        """Learn whether a draft whose parent was accepted was ``accepted``. Other arguments as of :meth:`chance`."""
        if self._counts(log_q):
            place, expected = self._bin(log_q, depth, first, kind), self._expected(log_q, first)
            self._text[kind].learn(accepted, min(expected * self._ratios[place], 1.0))
            self._seen[place].learn(accepted, expected)
            self._ratios[place] = self._seen[place].value

    def _counts(self, log_q: float) -> bool:
        return log_q > (-math.inf if self._sampled else LEAST)  # False for NaN

    def _expected(self, log_q: float, first: bool) -> float:
        q = (1.0 + math.exp(log_q)) / 2 if self._sampled else math.exp(log_q)
        return q * (1.0 + self._gain) / (1.0 + q * self._gain) if first else q

    @staticmethod
    def _bin(log_q: float, depth: int, first: bool, kind: Kind) -> int:
        place = int(math.sqrt(max(log_q, LEAST) / LEAST) * (BINS - 1)) if log_q < 0.0 else 0
        return 4 * (len(Kind) * place + kind) + 2 * (depth > 1) + first


class Rate:
    """A ratio of two sums that fade.

    Args:
        over: the numerator's prior, per observation.
        under: the denominator's.
        memory: observations after which the sums have faded to 1/e, and the weight of the prior.
    """

    def __init__(self, over: float, under: float, memory: float) -> None:
        self.over, self.under, self.memory = over * memory, under * memory, memory

    @property
    def value(self) -> float:
        """The present ratio."""
        return self.over / self.under

    def learn(self, over: float, under: float) -> None:
        """Add one observation to both sums."""
        self.over += over - self.over / self.memory
        self.under += under - self.under / self.memory

    def recent(self, memory: float) -> Rate:
        """Return a ratio with this value as its prior and another memory."""
        return Rate(self.over / self.memory, self.under / self.memory, memory)


@dataclass
class Trees:
    """Totals over trees that were chosen round by round.

    Attributes:
        nodes: of one row's tree in every round, the root included.
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

    def add(self, other: Trees) -> None:
        """Add the totals of ``other``."""
        self.nodes += other.nodes
        for name in ("tokens", "expected_tokens", "seconds", "expected_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """Return a record, with ``nodes`` as the number of rounds by tree size."""
        return {**asdict(self), "nodes": {str(nodes): count for nodes, count in sorted(Counter(self.nodes).items())}}


class LawKind(NamedTuple):
    """How the drafts of a request are verified.

    Attributes:
        tilt: nats that the law gives for an accepted draft, as in :class:`DraftRequest`.
        name: of the rule, or "several". Requests with the same name and tilt share what they learn.
        sampled: whether the drafts are a chain sampled from q.
    """

    tilt: float = 0.0
    name: str = ""
    sampled: bool = False


class Pause:
    """Leaves out what does not pay, and attempts it again after a while.

    A pause is long enough for an attempt to cost no more than ATTEMPTS_SHARE of the pause's tokens.

    Attributes:
        rounds: of the present pause; 0 if there is none.
        attempt: rounds of the present attempt although it did not pay.
    """

    def __init__(self) -> None:
        self.rounds = self.attempt = 0

    def allows(self, loss: float, batch: int) -> bool:
        """Return whether a round goes on or attempts again. ``loss``: tokens that it is expected to lose by that."""
        return ATTEMPT * loss <= ATTEMPTS_SHARE * self.rounds * batch or 0 < self.attempt < ATTEMPT

    def note(self, went: bool, loss: float, counts: bool = True) -> None:
        """Note whether the round did so. ``counts``: whether a round that did not is one of a pause."""
        self.attempt = self.attempt + 1 if went and loss > 0.0 else 0
        self.rounds = 0 if went else self.rounds + counts


class SideWorth:
    """Whether it pays to ask a grafted drafter: the tokens of its drafts against its time and their verification."""

    def __init__(self, costs: Costs, batch: int) -> None:
        self.costs, self.batch, self.pause, self.trials = costs, batch, Pause(), 0
        self.gain, self.cost = Rate(0.2 * batch, 1.0, SIDE_MEMORY), Rate(0.02, 1.0, SIDE_MEMORY)

    def asks(self, rate: float) -> bool:
        """Return whether to ask it in this round. ``rate``: tokens per forward over a single token."""
        loss = rate * self.cost.value - self.gain.value
        asked = self.trials < SIDE_TRIALS or self.pause.allows(loss, self.batch)
        self.trials += 1
        self.pause.note(asked, loss)
        return asked

    def learn(self, seconds: float, nodes: int, grafted: int, accepted: int) -> None:
        """Learn from a round in which it was asked.

        Args:
            seconds: of its drafting and of merging its drafts.
            nodes: verified nodes of all rows.
            grafted: its own among them.
            accepted: those that were accepted.
        """
        self.gain.learn(accepted, 1.0)
        verifying = self.costs.forward(nodes) - self.costs.forward(nodes - grafted)
        self.cost.learn(verifying + seconds / (self.costs.pace or 1.0), 1.0)


class Knowledge:
    """Estimates for one law and one batch size.

    Attributes:
        costs: of rounds.
        curve: calibration of the drafter's probabilities.
        rate: tokens per unit of cost.
        reach_ratio: rows that reached expanded nodes, per row that was expected to.
        accept_rate: rows that accepted a child of an expanded node, per row that reached one.
        gain: tokens that drafts are expected to add in a round, less the cost of their verification, per row, or per
            share of a row's tokens that other drafters miss.
        draft_cost: of a round that drafts.
        trials: rounds of the trial phase so far.
        pause: of drafting.
        side: whether grafted drafters pay.
    """

    def __init__(self, costs: Costs, batch: int, law: LawKind) -> None:
        self.costs, self.curve = costs, Curve(law.tilt, law.sampled)
        self.rate = Rate(1.5 * batch, costs.forward(batch) + costs.rest(True), LONG_MEMORY)
        self.reach_ratio = Rate(1.0, 1.0, DEPTH_MEMORY)
        self.accept_rate = Rate(0.6, 1.0, DEPTH_MEMORY)
        self.gain = Rate(1.0, 1.0, DEPTH_MEMORY)
        self.draft_cost = Rate(costs.drafting(2, 2 * batch), 1.0, DEPTH_MEMORY)
        self.trials, self.pause, self.side = 0, Pause(), SideWorth(costs, batch)


class AutoMemory:
    """What a drafter's requests have learned about rounds.

    Args:
        device: type of the device, such as "cpu".
        clock: returns seconds.
        prior: assumed costs of a round (default: a draft head's on this device).

    Attributes:
        reads_scores: whether the host reads the scores of every depth to choose the next one. Only on a CPU, because
            elsewhere each read would sync with the device.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.perf_counter, prior: Prior | None = None) -> None:
        self.prior = prior or PRIORS.get(device, PRIORS["cuda"])
        self.reads_scores = device == "cpu"
        self.clock = clock
        self._costs: dict[int, Costs] = {}
        self._known: dict[tuple[int, LawKind], Knowledge] = {}

    def knowledge(self, batch: int, law: LawKind) -> Knowledge:
        """Return the estimates of earlier requests with a similar batch and law. The caller updates them in place."""
        size = batch.bit_length()
        costs = self._costs.setdefault(size, Costs(self.prior))
        key = size, law._replace(tilt=round(4 * min(law.tilt, 4.0)))
        if key not in self._known:
            self._known[key] = Knowledge(costs, batch, law)
        return self._known[key]
