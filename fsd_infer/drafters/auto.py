"""Choose the draft tree of every round: ``tree="auto"``.

A round drafts L depths, expands E nodes and verifies N nodes. In forwards over a single token it costs

    cost = C(N) + a·L + b·E + f,    C(1) = 1, C piecewise linear and non-decreasing; a, b, f > 0.

It emits 1 + Σ P(n) tokens in expectation, summed over its drafts n. The chance P(n) that n is accepted is the product
of g(q) over the steps to n. Here q is the drafter's probability of a step, and g is a calibration curve that includes
the tilt of a law that favours drafts. Costs and g are estimated while decoding (:mod:`fsd_infer.drafters.estimates`).
Every round maximises

    tokens - rate · cost,    rate = tokens per unit of cost so far.

At the fixed point this maximises tokens per second (Dinkelbach 1967). A node is expanded, a depth added or a node kept
only if its expected tokens exceed rate times its cost. So predictable text gets large trees, other text small ones. The
rows of a batch share one forward, hence one sum.

Related work: Sequoia (arXiv 2402.12374) chooses one tree per device. DySpec (2410.11744) grows trees best first.
SpecDec++ (2405.19715) stops at a threshold. OPT-Tree (2406.17276) keeps the nodes with the best scores.

**Laws stay.** A round's tree depends on the text, and on what earlier rounds took and accepted. The round's random
draws are independent of all that. So, given the past, a round emits by the rule's law on any tree. By the chain rule,
so does the whole text. Timing can change *which* draws give which token. A request with a seed therefore reads no clock
and learns nothing, and its answer repeats.

**Chains drawn from q** (``exact:block=true``) are chosen in length only. Whether a draft x is drawn depends on the
drafts before it, on the draws of other rows and on the past. It never depends on x, and every drawn draft is verified.
So, given the context and all earlier draws, one of two cases holds. Either x ~ q, and the rule's test of x gives its
law. Or no x is drawn, and the target's own token has the same law. Hence the mixture has it too. Dropping drafts with a
small q(x) would break this: the test would see likely x only, and the law would shift towards them. Trees with drawn
nodes keep to the same principle (:mod:`fsd_infer.drafters.drawing`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_core.tensors import lists
from fsd_infer.drafters.estimates import KNOTS, AutoMemory, Costs, Kind, Knowledge, LawKind, Trees
from fsd_infer.tree import DraftTree

RATE_MEMORY, GAIN_MEMORY = 20, 15  # rounds of a text
UNLIKELY = 0.01  # chance of acceptance below which a draft is ignored
TRIALS, LEAST_TRIALS = 12, 4  # first rounds of one row, and of any batch; every other one drafts unconditionally
AHEAD = 3  # depths that the decision to go on looks ahead
MOST_TOGETHER = 160  # nodes of all trees in a batch
RECENT, USUAL = 5, 8  # trees whose median size is typical, and the size before any
MOST_LEAST = 0.25  # of least_chance


class Step(NamedTuple):
    """A draft, given its parent.

    Attributes:
        parent: node number of the parent.
        log_q: the drafter's ln q of the step.
        first: whether it is the likeliest of its siblings.
        kind: how it was proposed.
    """

    parent: int
    log_q: float
    first: bool
    kind: Kind = Kind.LIKELY


class AutoTree:
    """Chooses the tree of every round of one request, and learns from what the rounds took and emitted.

    A round calls :meth:`expands_root`, then :meth:`expand` for every depth, then :meth:`keep` or :meth:`keep_all`. It
    calls :meth:`mark` before drafting, before verification and after it, and :meth:`end` at its end. Before a root is
    expanded, :meth:`cover` takes other drafters' trees.

    Args:
        memory: of the drafter.
        batch: number of rows.
        law: how drafts are verified.
        nodes: most nodes of one row's tree, the root included.
        learns: False: read no clock and keep nothing, so that trees are a function of the text alone.

    Attributes:
        trees: the trees of the request so far.
        depths: depths drafted in this round.
        expanded: nodes expanded in this round, over all rows.
    """

    def __init__(
        self,
        memory: AutoMemory,
        batch: int,
        law: LawKind,
        nodes: int,
        learns: bool = True,
    ) -> None:
        self.memory, self.law, self.most, self.learns = memory, law, nodes, learns
        self.reads_scores = memory.reads_scores
        self.known = memory.knowledge(batch, law) if learns else Knowledge(Costs(memory.prior), batch, law)
        self.known.curve.begin_text()
        self.trees, self.batch = Trees(), 0
        self._begin(batch)

    def _begin(self, batch: int) -> None:
        """Begin a round of ``batch`` rows."""
        if batch != self.batch:
            if self.learns:
                self.known = self.memory.knowledge(batch, self.law)
            self.rate = self.known.rate.recent(RATE_MEMORY)
            self.gain = self.known.gain.recent(GAIN_MEMORY)
        self.batch = batch
        self.depths = self.expanded = 0
        self._resumed = self._is_trial = self._ignored = False
        self._asks: bool | None = None  # grafted drafters
        self._side_seconds = 0.0
        self._expected_rows = [float(batch)]  # at the expanded nodes of each depth
        self._chances: list[float] = []  # of all drafts of all rows, falling
        self._frontier = [[1.0] for _ in range(batch)]  # chances of each row's nodes that may be expanded next
        self._uncovered = [1.0] * batch  # shares of its tokens that other drafters' trees miss
        self._gain = self._covered_gain = 0.0  # expected of the drafts so far, and of other drafters' trees
        self._marks: list[float] = []
        self._steps: list[list[Step]] = []  # of each row's tree
        self._nodes = 0  # of a row's tree; 0 if nothing was drafted

    # drafting --------------------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """Whether the last round had no drafts. The next one rarely has any either."""
        return self.known.pause.rounds > 0

    def asks_side(self) -> bool:
        """Return whether this round asks grafted drafters: they may cost more than their drafts gain."""
        if self._asks is None:
            self._asks = not self.learns or self.known.side.asks(self.rate.value)
        return self._asks

    @contextmanager
    def timing_side(self) -> Iterator[None]:
        """Count the time of this block as the grafted drafter's."""
        began = self.memory.clock() if self.learns else 0.0
        yield
        self._side_seconds += self.memory.clock() - began if self.learns else 0.0

    def expands_root(self) -> bool:
        """Return whether this round drafts. Trial rounds always do, and so do attempts after a pause."""
        known, loss = self.known, self._loss()
        in_trials = known.trials < max(TRIALS // self.batch, LEAST_TRIALS)
        if in_trials:
            known.trials += 1
            self._is_trial = known.trials % 2 == 1
            drafts = self._is_trial or not self.learns and loss <= 0.0  # the others show what a plain round costs
        else:
            drafts = known.pause.allows(loss, self.batch)
        if drafts:
            self._resumed = known.pause.rounds > 0  # the drafter first reads the text of the pause
            self.count_depth(1)
        known.pause.note(drafts, loss, counts=not in_trials)
        return drafts

    def _loss(self) -> float:
        """Return the tokens that drafting in this round is expected to lose; negative if it gains."""
        if not self.reads_scores:
            return -1.0
        cost = self.known.costs.reading + self.known.draft_cost.value
        return self.rate.value * cost - self.gain.value * sum(self._uncovered)

    def cover(self, tree: DraftTree) -> None:
        """Note another drafter's tree of this round, before this drafter drafts.

        A root is worth expanding where that tree is likely to be wrong or to end early. Accepted drafts have accepted
        children with chance a, so (1 - a)·a^(d - 1) of a head's tokens have depth d. The time before is not its own.
        """
        self.mark()
        if not self.reads_scores:
            return
        chances: list[float] = []
        accept = self.known.accept_rate.value
        for row, (scores, parents) in enumerate(zip(*lists(tree.scores, tree.parents), strict=True)):
            drafts, shares = [math.exp(score) for score in scores[1:]], [(1.0 - accept) / accept]
            for parent in parents[1:]:
                shares.append(accept * shares[parent])
            self._uncovered[row] *= 1.0 - min(sum(map(mul, drafts, shares[1:])), 1.0)
            chances += drafts
        self._covered_gain = max(self._covered_gain, self._best_gain(sorted(chances, reverse=True))[0])

    @property
    def least_chance(self) -> float:
        """The least chance of acceptance at which a node is worth verifying, in a tree as large as the last ones."""
        slopes, nodes = self.known.costs.forward_slopes.weights, self.trees.nodes[-RECENT:] or [USUAL]
        typical = sorted(nodes)[len(nodes) // 2] * self.batch
        return min(max(self.rate.value * slopes[max(bisect_left(KNOTS, typical) - 1, 0)], UNLIKELY), MOST_LEAST)

    def reach(self, scores: Tensor) -> Tensor:
        """Return the log chance that each of the nodes that were expanded last is accepted: [B, E], as ``scores``."""
        return torch.tensor(self._frontier, dtype=scores.dtype, device=scores.device).log()

    def expand(self, log_q: Tensor, drawn: Tensor | None = None) -> Tensor | None:
        """Choose which candidates of this depth to expand.

        Args:
            log_q: [B, E, w] ln q of the candidates under the nodes that were expanded last, falling along w.
            drawn: [B, E, w] which of them were drawn; None: none.

        Returns:
            [B, E'] places among a row's E · w candidates, the likeliest first; None if drafting stops here.
        """
        curve, depth = self.known.curve, self.depths
        best: list[list[int]] = []
        frontier: list[list[float]] = []
        most, known = log_q.shape[2], self.known
        last = torch.zeros_like(log_q[..., 0]) if drawn is None else drawn[..., -1]
        for row, draws, before in zip(log_q.tolist(), last.tolist(), self._frontier):
            chances: list[float] = []
            for steps, draw, above in zip(row, draws, before):
                chances += [above * curve.chance(step, depth, place == 0) for place, step in enumerate(steps)]
                if draw:
                    chances[-1] = above * curve.chance(steps[-1], depth, False, Kind.DRAWN)
            order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:most]
            best.append(order)
            frontier.append([chances[place] for place in order])
            self._chances += [chance for chance in chances if chance > UNLIKELY]
        self._chances.sort(reverse=True)
        del self._chances[MOST_TOGETHER:]
        self._gain, marginal = self._best_gain(self._chances)
        self._frontier = frontier
        # Expand a node only if its best child's expected gain exceeds the cost of its drafting and verification.
        least = self.rate.value * known.costs.draft_slopes.weights[1] + marginal
        accept = known.accept_rate.value * known.reach_ratio.value
        width = sum(accept * sum(row[place] for row in frontier) > least * self.batch for place in range(len(best[0])))
        if not width or not self._pays(width):
            return None
        self.count_depth(width)
        self._frontier = [row[:width] for row in frontier]
        self._expected_rows.append(sum(min(sum(row), 1.0) for row in self._frontier))
        return torch.tensor([row[:width] for row in best], device=log_q.device)

    def _pays(self, width: int) -> bool:
        """Return whether up to AHEAD more depths, the first of ``width`` nodes a row and later ones of one, pay."""
        known, rate = self.known, self.rate.value
        accept, reach = known.accept_rate.value, known.reach_ratio.value
        chances, cost = self._chances, 0.0
        best = [[chance * reach * accept for chance in row[:width]] for row in self._frontier]
        for depth in range(AHEAD):
            cost += known.costs.drafting(1, (width if depth == 0 else 1) * self.batch)
            chances = sorted([*chances, *(chance for row in best for chance in row)], reverse=True)
            if self._best_gain(chances)[0] - self._gain > rate * cost:
                return True
            best = [[row[0] * accept] for row in best]
        return False

    def _best_gain(self, chances: Sequence[float]) -> tuple[float, float]:
        """Return the largest net gain of verifying a prefix of these drafts, and the least gain of one more node.

        Args:
            chances: of acceptance, falling.

        Returns:
            Expected tokens minus rate times cost for the best prefix. The chance that one more node needs: that of the
            prefix's last node, which it may displace, or the cost of a place after it, whichever is less.
        """
        slopes, rate = self.known.costs.forward_slopes.weights, self.rate.value
        best = gain = 0.0
        kept = 0
        for count, chance in enumerate(chances, 1):
            gain += chance - rate * slopes[bisect_left(KNOTS, self.batch + count) - 1]
            if gain > best:
                best, kept = gain, count
        last = chances[kept - 1] if kept else 1.0
        return best, min(last, rate * slopes[bisect_left(KNOTS, self.batch + kept + 1) - 1])

    def count_depth(self, width: int) -> None:
        """Count one more depth that expands ``width`` nodes of every row."""
        self.depths += 1
        self.expanded += width * self.batch

    # what is verified ------------------------------------------------------------------------------------------------

    def keep(self, tree: DraftTree) -> Tensor:
        """Choose the nodes to verify. Syncs with the device.

        Args:
            tree: all candidates.

        Returns:
            [B, K] node numbers, the root and then the likeliest nodes.
        """
        gains, found, longest, least = [0.0] * self.most, self._steps_of(tree), 1, 1
        held = torch.zeros_like(tree.is_draft) if tree.held is None else tree.held
        orders = []
        for (_, chances), must in zip(found, held.tolist()):
            # nodes that must be verified, then the likeliest; a parent before its children
            order = sorted(range(1, len(chances)), key=lambda node: (not must[node], -chances[node]))
            orders.append(order)
            least = max(least, 1 + sum(must[1:]))
            longest = max(longest, least, 1 + sum(chance > 0.0 for chance in chances[1:]))
            for drafts, gain in enumerate(accumulate(chances[node] for node in order[: self.most - 1]), 1):
                gains[drafts] += gain
        most = min(self.most, longest, max(MOST_TOGETHER // self.batch, 2, least))
        costs, rate = self.known.costs, self.rate.value
        sizes = range(max(least, 1 + self._is_trial), most + 1) or range(1, most + 1)
        nodes = max(sizes, key=lambda n: gains[n - 1] - rate * costs.forward(n * self.batch))
        self._predict(gains[nodes - 1], nodes)
        kept = [
            [0, *sorted(sorted(order[: nodes - 1]), key=lambda node: -chances[node])]
            for (_, chances), order in zip(found, orders)
        ]
        for (steps, _), row in zip(found, kept):
            number = {node: place for place, node in enumerate(row)}
            self._steps.append([steps[node]._replace(parent=number[steps[node].parent]) for node in row])
        return torch.tensor(kept, device=tree.parents.device)

    def keep_all(self, tree: DraftTree) -> None:
        """Keep every node of a sampled chain. Dropping one would shift the law."""
        found = self._steps_of(tree)
        self._predict(sum(sum(chances[1:]) for _, chances in found), tree.tokens.shape[1])
        self._steps = [steps for steps, _ in found]

    def _predict(self, drafts: float, nodes: int) -> None:
        """Note the expected accepted drafts of all rows and the cost of verifying ``nodes`` nodes per row."""
        costs = self.known.costs
        forward, drafting = costs.forward(nodes * self.batch), costs.drafting(self.depths, self.expanded)
        self._gain = drafts - self.rate.value * (forward - costs.forward(self.batch))
        self._nodes, self._tokens = nodes, self.batch + drafts
        self._cost = forward + drafting + costs.rest(not self.paused)

    def _steps_of(self, tree: DraftTree) -> list[tuple[list[Step], list[float]]]:
        """Return every row's steps and chances of acceptance by node."""
        self._steps = []
        found = []
        kinds = torch.zeros_like(tree.parents)
        if tree.proposers is not None:
            kinds = kinds.masked_fill(tree.proposers > 0, int(Kind.GRAFTED))
        if tree.drawn is not None:
            kinds = kinds.masked_fill(tree.drawn, int(Kind.DRAWN))
        for scores, parents, kind in zip(*lists(tree.scores, tree.parents, kinds)):
            firsts: dict[int, int] = {}  # the likeliest child of each inner node
            for node in range(1, len(scores)):
                best = firsts.setdefault(parents[node], node)
                if scores[node] > scores[best]:
                    firsts[parents[node]] = node
            steps, chances, depths = [Step(0, 0.0, False)], [1.0] * len(scores), [0] * len(scores)
            for node in range(1, len(scores)):
                parent = parents[node]
                depths[node] = depths[parent] + 1
                first = firsts[parent] == node and kind[node] != Kind.DRAWN
                step = Step(parent, scores[node] - scores[parent], first, Kind(kind[node]))
                steps.append(step)
                above = chances[parent]
                of_step = self.known.curve.chance(step.log_q, depths[node], step.first, step.kind)
                chances[node] = above * of_step if above > UNLIKELY else 0.0
            found.append((steps, chances))
        return found

    def ignore(self) -> None:
        """Learn nothing from this round, because another tree than the chosen one is verified."""
        self._ignored = True

    # learning --------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Note the time at which drafting begins, verification begins or verification ends, in this order."""
        self._marks.append(self.memory.clock() if self.learns else 0.0)

    def end(self, path: Sequence[Sequence[int]], accepted: Sequence[int], rows: int) -> None:
        """End a round, or, if nothing was marked, the prefill.

        Args:
            path: nodes of each row's accepted path, the root first.
            accepted: number of accepted drafts of each row.
            rows: number of rows that go on.
        """
        if self._marks:
            self.mark()
            if not self._ignored:
                self._learn(path, accepted, timed=rows == self.batch)
        if rows:
            self._begin(rows)

    def _learn(self, path: Sequence[Sequence[int]], accepted: Sequence[int], timed: bool) -> None:
        """Update all estimates. ``timed``: no row ended, so the time after verification is typical."""
        if not self._nodes:
            self._predict(0.0, 1)
        costs, curve, nodes = self.known.costs, self.known.curve, self._nodes * self.batch
        *others, draft, forward, rest = (last - first for first, last in pairwise(self._marks))
        rest += sum(others)
        tokens, seconds = float(sum(accepted) + self.batch), draft + forward + (rest if timed else 0.0)
        self.trees.add(Trees([self._nodes], tokens, self._tokens, seconds, self._cost * (costs.pace or 0.0)))
        self.rate.learn(tokens, self._cost)
        self.known.rate.learn(tokens, self._cost)
        if not self._resumed:
            costs.learn(nodes, forward, self.depths, self.expanded, draft, rest if timed else None, not self.paused)
        if self.depths:
            for gain in (self.gain, self.known.gain):
                gain.learn(max(self._gain - self._covered_gain, 0.0), sum(self._uncovered))
            self.known.draft_cost.learn(costs.drafting(self.depths, self.expanded), 1.0)
            for depth, expected in enumerate(self._expected_rows):
                reached, went_on = (sum(count >= least for count in accepted) for least in (depth, depth + 1))
                self.known.accept_rate.learn(went_on, reached)
                if depth:
                    self.known.reach_ratio.learn(reached, expected)
        grafted = right = 0
        for steps, way, count in zip(self._steps, path, accepted):
            on_path = set(way[1 : count + 1])
            grafted += sum(step.kind is Kind.GRAFTED for step in steps)
            right += sum(step.kind is Kind.GRAFTED and node in on_path for node, step in enumerate(steps))
            depth_of = dict(zip(way[: count + 1], range(count + 1)))  # of the nodes on the accepted path
            for node, step in enumerate(steps[1:], 1):
                if step.parent in depth_of:
                    curve.learn(step.log_q, depth_of[step.parent] + 1, step.first, step.kind, node in depth_of)
        if self._asks and costs.pace is not None:
            self.known.side.learn(self._side_seconds, nodes, grafted, right)
