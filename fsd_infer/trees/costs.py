"""What a round costs on a machine, learned while decoding, for ``tree="auto"``.

Every estimate is recursive and forgets. Known bounds hold throughout: more nodes never cost less, and drafting is never
free. A stall or a clock that jumps counts for little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fsd_infer.targets.target import Target
from fsd_infer.trees.prices import KNOTS, spans
from fsd_infer.trees.shape import of_device

NOISE, SAME_NOISE = 0.1, 0.3  # relative standard deviation of a measured cost, compared with another round and alone
PRIOR_SD = 0.8  # relative standard deviation of a prior slope
MIN_FORWARD_SD = 0.04  # at least, of C's slopes: machines differ by more than their small ones
# correlation of these deviations, the first slope's excepted: slopes tend to be too high together
PRIOR_CORRELATION = 0.7
FORGETTING = 0.01  # share of the evidence that a round forgets
RECENT = 5  # rounds whose median gives the present speed of the machine
LAUNCH_COST = 0.05  # fixed cost of a small LM's forward, in forwards of the target


@dataclass(frozen=True)
class CostPrior:
    """Costs that are assumed before anything was timed, in forwards over a single token.

    Attributes:
        slopes: slopes of C between KNOTS, per node.
        drafting: cost of a depth, and of an expanded node.
        rest: cost of everything else in a round, and of the drafter's reading of the accepted tokens.
    """

    slopes: tuple[float, ...]
    drafting: tuple[float, float]
    rest: tuple[float, float]

    def for_model(self, share: float) -> CostPrior:
        """Return the prior for a small LM whose forward takes ``share`` of the target's; 0: there is no model.

        The small LM reads the accepted tokens together with the root, in the forward of the first depth.
        """
        depth = LAUNCH_COST + share if share else 0.001
        return CostPrior(self.slopes, (depth, max(share * self.slopes[3], 0.0005)), (self.rest[0], 0.01))


PRIORS = {
    # keys: kernels and format of weights. With blocks, two tokens take the time of one, and arithmetic bounds more: on
    # one core of an EPYC the built-in model takes 4.5 ms for one row, 4.8 for 2, 5.9 for 3, 10.4 for 6 and 27 for 16
    "avx512 blocks": CostPrior((0.06, 0.33, 0.35, *[0.36] * (len(KNOTS) - 3)), (0.18, 0.02), (0.14, 0.1)),
    # the same on AMX tiles: the built-in model takes 3.0 ms for one row, 5.2 for 4, 8.0 for 8 and 12.1 for 16
    "amx blocks": CostPrior((0.25, 0.25, 0.3, 0.17, *[0.25] * (len(KNOTS) - 4)), (0.17, 0.02), (0.15, 0.15)),
    # the same without AVX-512: on one core it takes 10 ms for one row, 12 for 2, 15 for 3 and 22 for 6
    "avx2 blocks": CostPrior((0.25, 0.25, 0.35, *[0.4] * (len(KNOTS) - 3)), (0.25, 0.02), (0.1, 0.15)),
    # smollm2-135m-maths takes 7.5 ms for one row, 13 for 6, 17 for 7 and 83 for 48
    "avx2 bf16": CostPrior((0.14, 0.14, 0.5, 0.18, *[0.22] * (len(KNOTS) - 4)), (0.14, 0.015), (0.07, 0.12)),
    "cpu": CostPrior((0.01, 0.01, 0.25, 0.05, *[0.09] * (len(KNOTS) - 4)), (0.06, 0.008), (0.04, 0.14)),
    "cuda": CostPrior((*[0.001] * 5, *[0.003] * (len(KNOTS) - 5)), (0.05, 0.0005), (0.03, 0.05)),
}


def prior_for(target: Target, relative_cost: float | None = None) -> CostPrior:
    """Return the costs of a round that are assumed before anything was timed. ``relative_cost``: a drafter's."""
    prior = PRIORS.get(f"{target.kernels} {target.weight_format}") or of_device(PRIORS, target.device)
    return prior if relative_cost is None else prior.for_model(relative_cost)


class RecursiveLeastSquares:
    """Positive weights w of y ≈ w·x, by recursive least squares that forgets towards its prior.

    A residual counts for two standard deviations at most. So a stall of a second moves the weights no more than one
    slow round.

    Args:
        prior: weights before the first observation.
        min_sd: least standard deviation of a prior weight.

    Attributes:
        weights: the present estimate.
    """

    def __init__(self, prior: Sequence[float], min_sd: float = 0.0) -> None:
        self.weights = list(prior)
        self._min_weights = [0.05 * value for value in prior]
        deviations = [max(PRIOR_SD * value, min_sd) for value in prior]
        self._prior = [
            [a * b * (1.0 if i == j else PRIOR_CORRELATION if i and j else 0.0) for j, b in enumerate(deviations)]
            for i, a in enumerate(deviations)
        ]
        self._covariance = [row[:] for row in self._prior]

    def predict(self, x: Sequence[float]) -> float:
        """Return w·x."""
        return sum(weight * value for weight, value in zip(self.weights, x))

    def learn(self, x: Sequence[float], y: float, noise: float) -> None:
        """Learn from one observation y with standard deviation ``noise``."""
        used = [(i, value) for i, value in enumerate(x) if value]  # few of them
        # P is the weights' covariance
        p_x = [sum(row[i] * value for i, value in used) for row in self._covariance]
        variance = sum(p_x[i] * value for i, value in used) + noise**2  # variance of the residual
        most = 2.0 * math.sqrt(variance)
        residual = min(max(y - self.predict(x), -most), most) / variance
        for i, (row, prior) in enumerate(zip(self._covariance, self._prior)):
            self.weights[i] = max(self.weights[i] + p_x[i] * residual, self._min_weights[i])
            gain = p_x[i] / variance
            self._covariance[i] = [
                entry + (FORGETTING * (before - entry) - gain * other) for entry, before, other in zip(row, prior, p_x)
            ]


class CostModel:
    """Costs of rounds on this device, in forwards over a single token.

    Args:
        prior: costs before anything was timed.
    """

    def __init__(self, prior: CostPrior) -> None:
        self.forward_slopes = RecursiveLeastSquares(prior.slopes, MIN_FORWARD_SD)
        self.draft_slopes = RecursiveLeastSquares(prior.drafting)
        self.rest_slopes = RecursiveLeastSquares(prior.rest)
        self._forward_seconds: deque[float] = deque(maxlen=RECENT)
        self._before: tuple[int, float, bool] | None = None  # nodes and seconds of the last round; whether it was plain

    @property
    def seconds_per_forward(self) -> float | None:
        """Present seconds of a forward over a single token; None if nothing was timed."""
        return median(self._forward_seconds) if self._forward_seconds else None

    def forward(self, nodes: int) -> float:
        """Return C(N): the cost of verifying ``nodes`` nodes of all rows."""
        return 1.0 + self.forward_slopes.predict(spans(nodes))

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
        self, nodes: int, depths: int, expanded: int, reads: bool, seconds: tuple[float, float, float | None]
    ) -> None:
        """Learn from one round. Ignore it if the clock was set back, or was not read.

        Args:
            nodes: verified nodes of all rows.
            depths: depths drafted.
            expanded: expanded nodes of all rows.
            reads: whether the drafter read the accepted tokens.
            seconds: time of drafting, of the target's forward, and of everything else; the last None: unknown.
        """
        drafts, (draft, forward, rest) = depths > 0, seconds
        if min(forward, draft if drafts else 1.0, 1.0 if rest is None else rest) <= 0.0:
            return
        expected = self.forward(nodes)
        unit = forward / expected  # seconds per unit of cost: a busy machine slows all parts of a round alike
        self._forward_seconds.append(unit)
        before, self._before = self._before, (nodes, forward, not drafts)
        if before is not None and before[2] == drafts:
            self._compare(*sorted((before[:2], (nodes, forward))))
        else:
            usual = median(self._forward_seconds)
            self.forward_slopes.learn(spans(nodes), forward / usual - 1.0, SAME_NOISE * expected)
        if drafts:
            self.draft_slopes.learn((depths, expanded), draft / unit, 2 * NOISE * self.drafting(depths, expanded))
        if rest is not None:
            self.rest_slopes.learn((1.0, float(reads)), rest / unit, 2 * NOISE * self.rest(reads))

    def _compare(self, plain: tuple[int, float], drafted: tuple[int, float]) -> None:
        """Learn from a round without drafts and the one with drafts before or after it, nodes and seconds each.

        Rounds alike say little of C: a slow machine and a large C look the same.
        """
        nodes, seconds = drafted
        usual = plain[1] / self.forward(plain[0])
        self.forward_slopes.learn(spans(nodes), seconds / usual - 1.0, NOISE * self.forward(nodes))
