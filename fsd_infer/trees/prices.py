"""Which drafts of a round are worth their time: what drafting and verifying costs, and which drafts are accepted.

A round drafts L depths, expands E nodes and verifies N nodes. In forwards over a single token it costs

    cost = C(N) + a·L + b·E + f,    C(1) = 1, C piecewise linear and non-decreasing; a, b, f > 0.

It emits 1 + Σ P(n) tokens in expectation, summed over its drafts n. The probability P(n) that n is accepted is the
product of g(q) over the steps to n. Here q is the drafter's probability of a step, and g is a :class:`Calibration` that
includes the draft bonus of a distribution that favours drafts. Every round maximises

    tokens - rate · cost,    rate = tokens per unit of cost so far.

At the fixed point this maximises tokens per second (Dinkelbach 1967). So rate · cost is a number of tokens, with
rate · a, rate · b … as prices: a node is expanded, a depth added or a node kept only if it brings more tokens than it
costs. So predictable text gets large trees, other text small ones. The rows of a batch share one forward, hence one
sum.

Related work: Sequoia (arXiv 2402.12374) chooses one tree per device. DySpec (2410.11744) grows trees best first.
SpecDec++ (2405.19715) stops at a threshold. OPT-Tree (2406.17276) keeps the nodes with the best scores.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import mul

from fsd_core.tensors import lists
from fsd_infer.trees.calibration import Calibration
from fsd_infer.trees.tree import DraftTree

KNOTS = (1, 2, 6, 7, 12, 24, 48, 96)  # node counts between which C is linear; the last slope continues
AHEAD = 3  # depths that the decision to go on looks ahead


@cache
def spans(nodes: int) -> tuple[float, ...]:
    """Return how many of ``nodes`` lie in each interval between KNOTS."""
    ends = (*KNOTS[1:], math.inf)
    return tuple(max(min(nodes, end) - start, 0.0) for start, end in zip(KNOTS, ends))


@dataclass(frozen=True)
class Prices:
    """By what a drafter grows the tree of one round; prices are in tokens of all rows.

    Attributes:
        calibration: probabilities of acceptance from the drafter's probabilities.
        verify_prices: price of verifying one node more, by interval between KNOTS.
        depth_price: price of drafting a depth.
        expand_price: price of expanding a node.
        accept_rate: probability that a row accepts a child of an expanded node that it has reached.
        reach_ratio: rows that reach expanded nodes, per row that is expected to.
        draft_price: price of drafting at all, with the drafter's reading of the accepted tokens.
        expected_gain: tokens that drafts are expected to add, less what their verification costs, per row that no
            grafted tree covers.
        max_loss: tokens that drafting may be expected to lose: more than 0 in attempts, infinite in trials.
        min_accept_prob: at which a node is worth verifying, in a tree as large as the last ones.
        uncovered: share of each row's tokens that the trees of grafted drafters leave to this one, in this round.
        min_nodes: least nodes of a tree if the model drafts, whatever they are worth, the root included.
        grafted_gain: net gain of the best of these trees.
        asks_grafted: whether grafted drafters are asked: they may cost more than their drafts gain.
        was_plain: whether the last round had no drafts. The next one rarely has any either, so texts may stay unread.
    """

    calibration: Calibration
    verify_prices: tuple[float, ...]
    depth_price: float
    expand_price: float
    accept_rate: float
    reach_ratio: float
    draft_price: float
    expected_gain: float
    max_loss: float
    min_accept_prob: float
    uncovered: tuple[float, ...]
    min_nodes: int = 1
    grafted_gain: float = 0.0
    asks_grafted: bool = True
    was_plain: bool = False

    @property
    def loss(self) -> float:
        """The tokens that drafting is expected to lose; negative if it gains."""
        return self.draft_price - self.expected_gain * sum(self.uncovered)

    def verify_price(self, nodes: int) -> float:
        """Return what verifying ``nodes`` nodes of all rows costs instead of one."""
        return sum(map(mul, self.verify_prices, spans(nodes)))

    def given_grafted(self, tree: DraftTree) -> Prices:
        """Return the prices for a main drafter, given the tree [B, N] of a grafted one.

        A root is worth expanding where that tree is likely to be wrong or to end early. Accepted drafts have accepted
        children with probability a, so (1 - a)·a^(d - 1) of a head's tokens have depth d.
        """
        all_probs: list[float] = []
        uncovered = list(self.uncovered)
        for row, (scores, parents) in enumerate(zip(*lists(tree.scores, tree.parents), strict=True)):
            # the share of a head's tokens that have each node's depth
            probs, at_depth = [math.exp(score) for score in scores[1:]], [(1.0 - self.accept_rate) / self.accept_rate]
            for parent in parents[1:]:
                at_depth.append(self.accept_rate * at_depth[parent])
            uncovered[row] *= 1.0 - min(sum(map(mul, probs, at_depth[1:])), 1.0)
            all_probs += probs
        grafted_gain = max(self.grafted_gain, self.best_gain(sorted(all_probs, reverse=True))[0])
        return replace(self, uncovered=tuple(uncovered), grafted_gain=grafted_gain)

    def best_gain(self, probs: Sequence[float]) -> tuple[float, float]:
        """Return the largest net gain of verifying a prefix of these drafts, and what one more node must gain.

        Args:
            probs: probabilities of acceptance, falling.

        Returns:
            Expected tokens minus costs of the best prefix. The probability that one more node needs: that of the
            prefix's last node, which it may displace, or what a node after it costs, whichever is less.
        """
        prices, rows = self.verify_prices, len(self.uncovered)
        best = gain = 0.0
        kept = 0
        for count, prob in enumerate(probs, 1):
            gain += prob - prices[bisect_left(KNOTS, rows + count) - 1]
            if gain > best:
                best, kept = gain, count
        last = probs[kept - 1] if kept else 1.0
        return best, min(last, prices[bisect_left(KNOTS, rows + kept + 1) - 1])

    def width(self, probs: Sequence[float], frontier: Sequence[Sequence[float]]) -> int:
        """Return how many nodes of each row to expand next; 0 if drafting stops.

        Args:
            probs: probabilities of acceptance of all drafts of all rows so far, falling.
            frontier: the same of each row's nodes that may be expanded, falling.
        """
        gain, marginal = self.best_gain(probs)
        # Expand a node only if its best child's expected gain exceeds what its drafting and verification cost.
        cost, accept_rate = (self.expand_price + marginal) * len(frontier), self.accept_rate * self.reach_ratio
        width = sum(accept_rate * sum(row[rank] for row in frontier) > cost for rank in range(len(frontier[0])))
        return width if width and self._pays(probs, gain, [row[:width] for row in frontier]) else 0

    def _pays(self, probs: Sequence[float], gain: float, frontier: Sequence[Sequence[float]]) -> bool:
        """Return whether up to AHEAD more depths pay, the first from this frontier, later ones of one node a row."""
        rows, cost = len(frontier), 0.0
        best = [[prob * self.reach_ratio * self.accept_rate for prob in row] for row in frontier]
        for depth in range(AHEAD):
            cost += self.depth_price + self.expand_price * (len(frontier[0]) if depth == 0 else 1) * rows
            probs = sorted([*probs, *(prob for row in best for prob in row)], reverse=True)
            if self.best_gain(probs)[0] - gain > cost:
                return True
            best = [[row[0] * self.accept_rate] for row in best]
        return False
