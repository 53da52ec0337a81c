"""How often drafts are accepted, by the drafter's probability: a calibration that learns while decoding."""

from __future__ import annotations

import math
from enum import IntEnum

from fsd_infer.trees.tree import MAX_BONUS

CERTAIN = 0.99  # upper bound of a draft's probability
BINS, MIN_LOG_Q = 20, -6.0  # equal in √(-ln q) down to MIN_LOG_Q: narrow where q is near 1
TEXT_WINDOW, BIN_WINDOW = 40, 200  # drafts


class RunningRatio:
    """A ratio of two running sums, which forget exponentially.

    Args:
        numerator: its prior, per observation.
        denominator: its prior, per observation.
        window: observations after which one counts 1/e of what it did, and the weight of the prior.

    Attributes:
        value: the present ratio.
    """

    def __init__(self, numerator: float, denominator: float, window: float) -> None:
        self.numerator, self.denominator, self.window = numerator * window, denominator * window, window
        self.value = self.numerator / self.denominator

    def learn(self, numerator: float, denominator: float) -> None:
        """Add one observation to both sums."""
        self.numerator += numerator - self.numerator / self.window
        self.denominator += denominator - self.denominator / self.window
        self.value = self.numerator / self.denominator

    def with_window(self, window: float) -> RunningRatio:
        """Return a ratio with this value as its prior and another window."""
        return RunningRatio(self.numerator / self.window, self.denominator / self.window, window)


class DraftKind(IntEnum):
    """How a draft was proposed."""

    LIKELY = 0  # as one of the likeliest tokens of its drafter
    GRAFTED = 1  # by another drafter
    DRAWN = 2  # drawn from q


class Calibration:
    """The probability that a draft is accepted if its parent was, from the drafter's probability q.

        g(q) = r · q·e^t / (1 + q·(e^t - 1))

    Here t is the distribution's draft bonus, or 0 for all but the likeliest sibling. The ratio r is accepted drafts
    over expected ones. It is a product of two ratios. One is of drafts of similar q, the same depth class (1, or more),
    the same rank class (first sibling, or not) and the same kind. The other is of the text's last drafts of the same
    kind: a text that a head drafts well may hold no copies, and the other way round. Both have a weak prior of 1.

    Under the exact test a draft sampled from q is accepted with probability min(1, p/q), however small q is. So where
    drafts are sampled, (1 + q)/2 replaces q.

    Args:
        draft_bonus: t, in nats.
        sampled: whether drafts are sampled from q.
    """

    def __init__(self, draft_bonus: float = 0.0, sampled: bool = False) -> None:
        self._gain, self._sampled = math.exp(min(draft_bonus, MAX_BONUS)) - 1.0, sampled
        self._ratios = [RunningRatio(0.2, 0.2, BIN_WINDOW) for _ in range(4 * len(DraftKind) * BINS)]
        self.begin_text()

    def begin_text(self) -> None:
        """Reset the ratios of the text's last drafts."""
        self._of_text = [RunningRatio(0.5, 0.5, TEXT_WINDOW) for _ in DraftKind]

    def accept_prob(self, log_q: float, depth: int, first: bool, kind: DraftKind = DraftKind.LIKELY) -> float:
        """Return g(q).

        Args:
            log_q: ln q of the draft, given its parent; for a drawn one what its tree says.
            depth: depth of the draft, from 1.
            first: whether the draft is the likeliest of its siblings.
            kind: how it was proposed.
        """
        if not self._counts(log_q):
            return 0.0
        ratio = self._ratios[self._bin(log_q, depth, first, kind)].value * self._of_text[kind].value
        return min(self._expected(log_q, first) * ratio, CERTAIN)

    def learn(self, log_q: float, depth: int, first: bool, kind: DraftKind, accepted: bool) -> None:
        """Learn whether a draft whose parent was accepted was ``accepted``. Others as for :meth:`accept_prob`."""
        if self._counts(log_q):
            ratio, expected = self._ratios[self._bin(log_q, depth, first, kind)], self._expected(log_q, first)
            self._of_text[kind].learn(accepted, min(expected * ratio.value, 1.0))
            ratio.learn(accepted, expected)

    def _counts(self, log_q: float) -> bool:
        return log_q > (-math.inf if self._sampled else MIN_LOG_Q)  # False for NaN

    def _expected(self, log_q: float, first: bool) -> float:
        q = (1.0 + math.exp(log_q)) / 2 if self._sampled else math.exp(log_q)
        return q * (1.0 + self._gain) / (1.0 + q * self._gain) if first else q

    @staticmethod
    def _bin(log_q: float, depth: int, first: bool, kind: DraftKind) -> int:
        bin_ = int(math.sqrt(max(log_q, MIN_LOG_Q) / MIN_LOG_Q) * (BINS - 1)) if log_q < 0.0 else 0
        return 4 * (len(DraftKind) * bin_ + kind) + 2 * (depth > 1) + first
