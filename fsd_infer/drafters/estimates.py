"""What a choice of trees learns while decoding: the cost of rounds, and how often drafts are accepted.

All estimates are recursive, forget, and cannot leave what is known of them: costs do not fall with more nodes, drafting
is never free, and one odd round, a stall or a clock that jumps, counts for little.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from fsd_infer.drafters.visits import MOST_TILT

KNOTS = (1, 6, 7, 12, 24, 48, 96)  # nodes between which C is linear; the last slope goes on
NOISE = 0.1  # of a measured cost, relative
DOUBT = 0.8  # of a prior slope, relative
KINSHIP = 0.7  # correlation of the doubts but the first: where one slope is less than was thought, so are others
FORGET = 0.01  # of what is known, per round
RECENT = 5  # rounds whose median tells how fast the machine is at present
CERTAIN = 0.99  # no draft is more certain
BINS, LEAST = 20, -6.0  # of the calibration curve: of √(-ln q), up to √(-LEAST), so they are fine where q is near 1
STARTING = 0.05  # of a small LM's forward, beside what its weights take
TEXT_MEMORY, BIN_MEMORY = 40, 200  # drafts


@dataclass(frozen=True)
class Prior:
    """What is assumed of a device before anything is known, in forwards over a single token."""

    slopes: tuple[float, ...]  # of C between KNOTS
    drafting: tuple[float, float]  # a depth, an expanded node
    rest: tuple[float, float]  # what a round costs besides; the drafter's reading of what was accepted

    def with_model(self, share: float) -> Prior:
        """The same where a depth is a forward of a model that takes ``share`` of the target's.

        It reads what was accepted with the root, in the first depth's forward.
        """
        a_node = share * self.slopes[2]
        return Prior(self.slopes, (STARTING + share, max(a_node, 0.0005)), (self.rest[0], 0.01))


PRIORS = {
    "cpu": Prior((0.01, 0.25, 0.05, *[0.09] * (len(KNOTS) - 3)), (0.06, 0.008), (0.04, 0.14)),
    "cuda": Prior((*[0.001] * 4, *[0.003] * (len(KNOTS) - 4)), (0.05, 0.0005), (0.03, 0.05)),
}


class Slopes:
    """Positive weights w of y ≈ offset + w·x: recursive least squares that forgets towards its prior.

    A surprise counts for two deviations at most, so a stall of a second moves the weights no more than a bad round.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.weights = list(prior)
        self._least = [0.05 * value for value in prior]
        doubts = [DOUBT * value for value in prior]
        self._prior = [
            [a * b * (1.0 if i == j else KINSHIP if i and j else 0.0) for j, b in enumerate(doubts)]
            for i, a in enumerate(doubts)
        ]
        self._covariance = [row[:] for row in self._prior]

    def predict(self, x: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(self.weights, x))

    def learn(self, x: Sequence[float], y: float, noise: float) -> None:
        """``noise``: standard deviation of y."""
        spread = [sum(entry * value for entry, value in zip(row, x)) for row in self._covariance]
        variance = sum(entry * value for entry, value in zip(spread, x)) + noise**2
        most = 2.0 * math.sqrt(variance)
        surprise = min(max(y - self.predict(x), -most), most) / variance
        for i, (row, prior) in enumerate(zip(self._covariance, self._prior)):
            self.weights[i] = max(self.weights[i] + spread[i] * surprise, self._least[i])
            share = spread[i] / variance
            for j, other in enumerate(spread):
                row[j] += FORGET * (prior[j] - row[j]) - share * other


class Costs:
    """What rounds cost on this device, in forwards over a single token. ``learns``: from the seconds they took."""

    def __init__(self, prior: Prior, learns: bool = True) -> None:
        self.learns = learns
        self.forward_slopes = Slopes(prior.slopes)
        self.draft_slopes = Slopes(prior.drafting)
        self.rest_slopes = Slopes(prior.rest)
        self._paces: deque[float] = deque(maxlen=RECENT)

    @property
    def pace(self) -> float | None:
        """Seconds of a forward over a single token at present; None: nothing was timed yet."""
        return median(self._paces) if self._paces else None

    def forward(self, nodes: int) -> float:
        return 1.0 + self.forward_slopes.predict(_spans(nodes))

    def drafting(self, depths: int, expanded: int) -> float:
        return self.draft_slopes.predict((depths, expanded))

    @property
    def reading(self) -> float:
        return self.rest_slopes.weights[1]

    def rest(self, reads: bool) -> float:
        """``reads``: the drafter reads what was accepted."""
        return self.rest_slopes.predict((1.0, float(reads)))

    def learn(
        self, nodes: int, forward: float, depths: int, expanded: int, draft: float, rest: float | None, reads: bool
    ) -> None:
        """A round took these seconds; ``rest`` None: not known. A clock that was set back teaches nothing."""
        if not self.learns or min(forward, draft, rest or 1.0) <= 0.0:
            return
        expected = self.forward(nodes)
        own = forward / expected  # whatever slows the machine down in this round slows all its parts
        self._paces.append(own)
        pace = median(self._paces)
        self.forward_slopes.learn(_spans(nodes), forward / pace - 1.0, NOISE * expected)
        if depths:
            expected = self.drafting(depths, expanded)
            self.draft_slopes.learn((depths, expanded), draft / own, 2 * NOISE * expected)
        if rest is not None:
            self.rest_slopes.learn((1.0, float(reads)), rest / own, 2 * NOISE * self.rest(reads))


def _spans(nodes: int) -> list[float]:
    """How far ``nodes`` reach into each stretch between KNOTS."""
    ends = (*KNOTS[1:], math.inf)
    return [max(min(nodes, end) - start, 0.0) for start, end in zip(KNOTS, ends)]


class Curve:
    """Chance that a draft is accepted, given that the draft above it was, by the drafter's own chance q of it.

    f(q) = r · q·e^t / (1 + q·(e^t - 1)), t the law's tilt (0 but for the likeliest sibling) and r = drafts accepted /
    drafts expected among those of about this q, depth (1 or more) and place among siblings (first or not), and among
    the text's last ones. Both begin as if some had been seen that behaved as expected.

    A draft that was sampled from q is accepted with min(1, p/q) under the exact test, however small q is: where
    ``sampled``, (1 + q)/2 stands for q in f.
    """

    def __init__(self, tilt: float = 0.0, sampled: bool = False) -> None:
        self._gain, self._sampled = math.exp(min(tilt, MOST_TILT)) - 1.0, sampled
        bins = 4 * BINS
        self._seen = [Rate(0.2, 0.2, BIN_MEMORY) for _ in range(bins)]
        self._ratios = [1.0] * bins
        self.begin_text()

    def begin_text(self) -> None:
        self._text = Rate(0.5, 0.5, TEXT_MEMORY)

    def chance(self, log_q: float, depth: int, first: bool) -> float:
        """``depth`` of the draft, from 1; ``first``: it is the likeliest of its siblings."""
        if not self._says(log_q):
            return 0.0
        ratio = self._ratios[self._bin(log_q, depth, first)] * self._text.value
        return min(self._expected(log_q, first) * ratio, CERTAIN)

    def learn(self, log_q: float, depth: int, first: bool, accepted: bool) -> None:
        if self._says(log_q):
            place, expected = self._bin(log_q, depth, first), self._expected(log_q, first)
            self._text.learn(accepted, min(expected * self._ratios[place], 1.0))
            self._seen[place].learn(accepted, expected)
            self._ratios[place] = self._seen[place].value

    def _says(self, log_q: float) -> bool:
        return log_q > (-math.inf if self._sampled else LEAST)  # NaN is not

    def _expected(self, log_q: float, first: bool) -> float:
        q = (1.0 + math.exp(log_q)) / 2 if self._sampled else math.exp(log_q)
        return q * (1.0 + self._gain) / (1.0 + q * self._gain) if first else q

    @staticmethod
    def _bin(log_q: float, depth: int, first: bool) -> int:
        place = int(math.sqrt(max(log_q, LEAST) / LEAST) * (BINS - 1)) if log_q < 0.0 else 0
        return 4 * place + 2 * (depth > 1) + first


class Rate:
    """A ratio of sums, of about the last ``memory`` rounds. It begins as if so many rounds had given these numbers."""

    def __init__(self, over: float, under: float, memory: float) -> None:
        self.over, self.under, self.memory = over * memory, under * memory, memory

    @property
    def value(self) -> float:
        return self.over / self.under

    def learn(self, over: float, under: float) -> None:
        self.over += over - self.over / self.memory
        self.under += under - self.under / self.memory

    def recent(self, memory: float) -> Rate:
        """A ratio that begins with this one's value and forgets faster."""
        return Rate(self.over / self.memory, self.under / self.memory, memory)


@dataclass
class Trees:
    """Trees that were chosen round by round, added up.

    Attributes:
        nodes: of a row's tree, the root included, round by round.
        tokens, expected_tokens: emitted in these rounds, and what was expected.
        seconds, expected_seconds: that they took, and what was expected; the latter 0 where no clock is read.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: float = 0.0
    expected_tokens: float = 0.0
    seconds: float = 0.0
    expected_seconds: float = 0.0

    def add(self, other: Trees) -> None:
        self.nodes += other.nodes
        for name in ("tokens", "expected_tokens", "seconds", "expected_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        """For records: rounds by number of nodes."""
        return {**asdict(self), "nodes": {str(nodes): count for nodes, count in sorted(Counter(self.nodes).items())}}
