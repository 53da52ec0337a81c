"""``tree="auto"``: the draft tree of each round, chosen from the drafter's scores by what earlier rounds have taught.

A round that drafts L depths, expands E nodes on them and verifies N nodes takes, in forwards over a single token,

    cost = C(N) + a·L + b·E + f,    C(1) = 1, C piecewise linear and non-decreasing; a, b, f > 0,

and emits 1 + Σ chance(n) tokens over its drafts n, where a draft is accepted with the product of f(q) over the steps to
it: q is the drafter's chance of a step (tilted, under a law that favours drafts) and f a calibration curve. Both are
estimated while decoding, and a round takes what has the largest

    tokens - rate · cost,    rate: tokens per unit of cost of the text so far,

which at a fixed point is the most tokens per second (Dinkelbach 1967). Nodes are expanded, depths added and nodes kept
as long as they are worth their cost, so sure texts get large trees and others small ones. Rows of a batch share one
forward, hence one such sum. Related: Sequoia (arXiv 2402.12374) chooses a tree per device, DySpec (2410.11744) grows
it best first, SpecDec++ (2405.19715) stops by a threshold, OPT-Tree (2406.17276) keeps what the scores favour.

**Laws stay.** A tree depends on the text, and on how long earlier rounds took and what they accepted. The draws of a
round are independent of all of it, so given everything before it a round emits by the rule's law on whatever tree it
has, and by the chain rule so does the text. What the clock says can change *which* draws give which token. So a request
with a seed reads no clock and keeps nothing, and its answer comes again.

**A chain that is sampled from q** (a small LM at temperature > 0) is chosen in length. Whether a draft x is drawn after
the drafts x₁ … xₖ depends on these, on what other rows have drawn and on the past, but never on x, and what is drawn is
verified: none is dropped by its q. So given a context and all that was drawn before it, either x ~ q and the rule's
test of x gives its law, or nothing is drawn and the target's own token does: the same law in both cases, hence in the
mixture. (Dropping x where q(x) is small would keep the test for likely x alone and shift the law to them.)
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_infer.device.transfer import lists
from fsd_infer.drafters.estimates import KNOTS, PRIORS, Costs, Curve, Prior, Rate, Trees
from fsd_infer.tree import DraftTree

RATE_MEMORY, DEPTH_MEMORY, LONG_MEMORY = 20, 40, 50  # rounds
UNLIKELY = 0.01  # drafts below are not weighed
TRIALS, LEAST_TRIALS = 12, 4  # first rounds, of a row and of any batch, every other one drafted whatever it promises
RETRY = 64  # rounds without drafts until one is tried again, and twice as many after each attempt in vain
AHEAD = 3  # depths that are drafted below a draft, when it is weighed whether to go on
LONGEST_PAUSE = 1024
MOST_TOGETHER = 160  # nodes of a batch


class Step(NamedTuple):
    """A draft given its parent: the drafter's ln q, and whether it is the likeliest of its siblings."""

    parent: int
    log_q: float
    first: bool


class LawKind(NamedTuple):
    """By what the drafts of a request will be verified.

    Attributes:
        tilt: as in :class:`DraftRequest`.
        name: laws of one name and tilt are learned about together.
        sampled: the drafts are a chain that is sampled from q.
    """

    tilt: float = 0.0
    name: str = ""
    sampled: bool = False


class Knowledge:
    """What was learned of a law and a size of batch."""

    def __init__(self, costs: Costs, batch: int, law: LawKind) -> None:
        self.costs, self.curve = costs, Curve(law.tilt, law.sampled)
        self.rate = Rate(1.5 * batch, costs.forward(batch) + costs.rest(True), LONG_MEMORY)
        self.reach = Rate(1.0, 1.0, DEPTH_MEMORY)  # rows that came to nodes that were expanded, per row expected to
        self.hit = Rate(0.6, 1.0, DEPTH_MEMORY)  # rows that went on below such nodes, per row that came to one
        self.rounds = 0  # so far, up to TRIALS
        self.idle = 0  # rounds since one was drafted
        self.patience = RETRY


class AutoMemory:
    """A drafter's: what its requests have taught of rounds.

    Args:
        device: the kind of device.
        clock: seconds.
        prior: what rounds are taken to cost at first; default: a head's.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.perf_counter, prior: Prior | None = None) -> None:
        self.prior = prior or PRIORS.get(device, PRIORS["cuda"])
        self.looks = device == "cpu"  # elsewhere a look at each depth would make the host wait
        self.clock = clock
        self._costs: dict[int, Costs] = {}
        self._known: dict[tuple[int, LawKind], Knowledge] = {}

    def knowledge(self, batch: int, law: LawKind) -> Knowledge:
        """Of earlier requests; what is learned is added to it."""
        size = batch.bit_length()
        costs = self._costs.setdefault(size, Costs(self.prior))
        key = size, law._replace(tilt=round(4 * min(law.tilt, 4.0)))
        if key not in self._known:
            self._known[key] = Knowledge(costs, batch, law)
        return self._known[key]


class AutoTree:
    """Chooses the tree of each of a request's rounds, and learns from what the round took and emitted.

    A round: :meth:`expands`, :meth:`expand` depth by depth, :meth:`keep`; :meth:`mark` as it begins, is drafted and
    verified; :meth:`end`.

    Args:
        memory: the drafter's.
        batch: rows.
        law: of the request.
        nodes: most of a tree, the root included.
        sizes: of trees that are as cheap as somewhat smaller ones, where forwards are recorded; None: any.
        learns: False: no clock is read and nothing is kept, so trees are a function of the text alone.
    """

    def __init__(
        self,
        memory: AutoMemory,
        batch: int,
        law: LawKind,
        nodes: int,
        sizes: Sequence[int] | None = None,
        learns: bool = True,
    ) -> None:
        self.memory, self.law, self.most, self.sizes, self.learns = memory, law, nodes, sizes, learns
        self.looks = memory.looks
        self.known = memory.knowledge(batch, law) if learns else Knowledge(Costs(memory.prior, False), batch, law)
        self.known.curve.begin_text()
        self.trees, self.batch = Trees(), 0
        self._begin(batch)

    def _begin(self, batch: int) -> None:
        """Begin a round of ``batch`` rows."""
        if batch != self.batch:
            if self.learns:
                self.known = self.memory.knowledge(batch, self.law)
            self.rate = self.known.rate.recent(RATE_MEMORY)
        self.batch = batch
        self.depths = self.expanded = 0
        self._resumed = self._tries = False
        self._reaches = [float(batch)]  # rows that are expected to come to nodes that are expanded, by depth
        self._chances: list[float] = []  # of all drafts so far, of any row
        self._frontier = [[1.0] for _ in range(batch)]
        self._open = [[1.0] * AHEAD for _ in range(batch)]  # chances that other drafters' trees are wrong by a depth
        self._worth = self._net(self._chances)
        self._marks: list[float] = []
        self._ignored = False
        self._steps: list[list[Step]] = []  # of each row's tree
        self._nodes = 0  # of a row's tree; 0: its root alone, for nothing was drafted

    # drafting --------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """The last round was not drafted, so the next one hardly will be."""
        return self.known.idle > 0

    def expands(self) -> bool:
        """Is the root worth expanding?"""
        known = self.known
        pays = not self.looks or self._pays(1, known.costs.reading)
        if known.rounds < max(TRIALS // self.batch, LEAST_TRIALS):
            known.rounds += 1
            self._tries = known.rounds % 2 == 1
            pays = pays or self._tries
        elif not pays and known.idle < known.patience:
            known.idle += 1
            return False
        else:
            self._resumed = known.idle > 0  # what was not read meanwhile is read first
            known.patience = RETRY if pays else min(2 * known.patience, LONGEST_PAUSE)
            known.idle = 0
            pays = True
        if pays:
            self.count(1)
        return pays

    def cover(self, tree: DraftTree) -> None:
        """What another drafter proposes in this round, before this one drafts: a root is worth expanding where that is
        likely to be wrong."""
        if not self.looks:
            return
        for row, scores, parents in zip(self._open, *lists(tree.scores, tree.parents), strict=True):
            depths, right = [0], [0.0] * AHEAD
            for score, parent in zip(scores[1:], parents[1:]):
                depths.append(depths[parent] + 1)
                if depths[-1] <= AHEAD:
                    right[depths[-1] - 1] += math.exp(score)
            row[:] = [chance * (1.0 - min(covered, 1.0)) for chance, covered in zip(row, right)]

    def expand(self, log_q: Tensor) -> Tensor | None:
        """Which candidates of this depth to expand, [B, E'] places among the row's E · w; None: drafting stops here.

        Args:
            log_q: [B, E, w] ln q of the candidates under the nodes that were expanded last.
        """
        curve, depth = self.known.curve, self.depths
        best: list[list[int]] = []
        frontier: list[list[float]] = []
        most, known = log_q.shape[2], self.known
        for row, before in zip(log_q.tolist(), self._frontier):
            chances: list[float] = []
            for steps, above in zip(row, before):
                chances += [above * curve.chance(step, depth, place == 0) for place, step in enumerate(steps)]
            order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:most]
            best.append(order)
            frontier.append([chances[place] for place in order])
            self._chances += [chance for chance in chances if chance > UNLIKELY]
        self._chances.sort(reverse=True)
        del self._chances[MOST_TOGETHER:]
        self._worth = self._net(self._chances)
        self._frontier = frontier
        # a node's best child has to be worth its drafting, and its verification or the node whose place it takes
        price = self.rate.value * known.costs.draft_slopes.weights[1] + self._marginal
        hit = known.hit.value * known.reach.value
        width = sum(hit * sum(row[place] for row in frontier) > price * self.batch for place in range(len(best[0])))
        if not width or not self._pays(width):
            return None
        self.count(width)
        self._frontier = [row[:width] for row in frontier]
        self._reaches.append(sum(min(sum(row), 1.0) for row in self._frontier))
        return torch.tensor([row[:width] for row in best], device=log_q.device)

    def _pays(self, width: int, more: float = 0.0) -> bool:
        """Is it worth it to expand the ``width`` likeliest nodes of each row's frontier, and perhaps the likeliest of
        their children, and so on?
        """
        known, rate = self.known, self.rate.value
        hit = known.hit.value
        children, cost = self._chances, more
        reach = known.reach.value if self.depths else 1.0
        best = [[chance * reach * hit for chance in row[:width]] for row in self._frontier]
        for depth in range(AHEAD):
            cost += known.costs.drafting(1, (width if depth == 0 else 1) * self.batch)
            news = (
                chance * (1.0 if self.depths else open[depth]) for row, open in zip(best, self._open) for chance in row
            )
            children = sorted([*children, *news], reverse=True)
            if self._net(children) - self._worth > rate * cost:
                return True
            best = [[row[0] * hit] for row in best]
        return False

    def _net(self, chances: Sequence[float]) -> float:
        """The most that the first ones of these drafts, the likeliest first, bring beyond what their nodes cost."""
        slopes, rate = self.known.costs.forward_slopes.weights, self.rate.value
        best = net = 0.0
        self._marginal = 1.0  # what one more node has to bring
        for nodes, chance in enumerate(chances, self.batch + 1):
            price = rate * slopes[bisect_left(KNOTS, nodes) - 1]
            if net == best:  # the first after the best ones
                self._marginal = min(self._marginal, price)
            net += chance - price
            if net > best:
                best, self._marginal = net, chance
        if net == best:
            self._marginal = min(self._marginal, rate * slopes[bisect_left(KNOTS, self.batch + len(chances) + 1) - 1])
        return best

    def count(self, width: int) -> None:
        """So many nodes of each row are expanded, one depth below."""
        self.depths += 1
        self.expanded += width * self.batch

    # what is verified ------------------------------------------------------------------------------------------------

    def keep(self, tree: DraftTree) -> Tensor:
        """[B, K] the nodes of a tree of candidates that are worth their verification, likely ones first. Waits for the
        device."""
        total, found, longest = [0.0] * self.most, self._read(tree), 1
        orders = []
        for _, chances in found:
            order = sorted(range(1, len(chances)), key=lambda node: -chances[node])  # a parent before its children
            orders.append(order)
            longest = max(longest, 1 + sum(chance > 0.0 for chance in chances[1:]))
            sums = 0.0
            for count in range(1, self.most):
                sums += chances[order[count - 1]] if count <= len(order) else 0.0
                total[count] += sums
        most = min(self.most, longest, max(MOST_TOGETHER // self.batch, 2))
        costs, rate = self.known.costs, self.rate.value
        sizes = range(1, most + 1) if self.sizes is None else [*(n for n in self.sizes if n < most), most]
        if self._tries:
            sizes = [n for n in sizes if n > 1] or sizes
        nodes = max(sizes, key=lambda n: total[n - 1] - rate * costs.forward(n * self.batch))
        self._expect(total[nodes - 1], nodes)
        kept = [[0, *order[: nodes - 1]] for order in orders]
        for (steps, _), row in zip(found, kept):
            number = {node: place for place, node in enumerate(row)}
            self._steps.append([steps[node]._replace(parent=number[steps[node].parent]) for node in row])
        return torch.tensor(kept, device=tree.parents.device)

    def keep_all(self, tree: DraftTree) -> None:
        """The same of drafts that were sampled, none of which may be dropped."""
        found = self._read(tree)
        self._expect(sum(sum(chances[1:]) for _, chances in found), tree.tokens.shape[1])
        self._steps = [steps for steps, _ in found]

    def _expect(self, drafts: float, nodes: int) -> None:
        """Note how many drafts of all rows are expected to be accepted, and how many nodes of a row are verified."""
        costs = self.known.costs
        cost = costs.forward(nodes * self.batch) + costs.drafting(self.depths, self.expanded)
        self._nodes, self._tokens, self._cost = nodes, self.batch + drafts, cost + costs.rest(not self.idle)

    def _read(self, tree: DraftTree) -> list[tuple[list[Step], list[float]]]:
        """Of each row its nodes' steps and chances to be accepted."""
        self._steps = []
        found = []
        for scores, parents in zip(*lists(tree.scores, tree.parents)):
            firsts: dict[int, int] = {}  # the likeliest child of each node that has any
            for node in range(1, len(scores)):
                best = firsts.setdefault(parents[node], node)
                if scores[node] > scores[best]:
                    firsts[parents[node]] = node
            steps, chances, depths = [Step(0, 0.0, False)], [1.0] * len(scores), [0] * len(scores)
            for node in range(1, len(scores)):
                parent = parents[node]
                depths[node] = depths[parent] + 1
                steps.append(Step(parent, scores[node] - scores[parent], firsts[parent] == node))
                above = chances[parent]
                of_step = self.known.curve.chance(steps[node].log_q, depths[node], steps[node].first)
                chances[node] = above * of_step if above > UNLIKELY else 0.0
            found.append((steps, chances))
        return found

    def ignore(self) -> None:
        """Learn nothing from this round: its tree is another than the one chosen here."""
        self._ignored = True

    # what it teaches -------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """A round begins, is drafted, or is verified, in turn."""
        self._marks.append(self.memory.clock() if self.learns else 0.0)

    def end(self, path: Sequence[Sequence[int]], accepted: Sequence[int], rows: int) -> None:
        """A round is over, or, where none was marked, the prompts are read.

        Args:
            path, accepted: per row the nodes on the accepted path, the root first, and how many are drafts.
            rows: that go on.
        """
        if self._marks:
            self.mark()
            if not self._ignored:
                self._learn(path, accepted, timed=rows == self.batch)
        if rows:
            self._begin(rows)

    def _learn(self, path: Sequence[Sequence[int]], accepted: Sequence[int], timed: bool) -> None:
        if not self._nodes:
            self._expect(0.0, 1)
        costs, curve, nodes = self.known.costs, self.known.curve, self._nodes * self.batch
        draft, forward, rest = (last - first for first, last in pairwise(self._marks))
        tokens, seconds = float(sum(accepted) + self.batch), draft + forward + (rest if timed else 0.0)
        self.trees.add(Trees([self._nodes], tokens, self._tokens, seconds, self._cost * (costs.pace or 0.0)))
        self.rate.learn(tokens, self._cost)
        self.known.rate.learn(tokens, self._cost)
        if not self._resumed:
            own = rest if timed else None
            costs.learn(nodes, forward, self.depths, self.expanded, draft, own, reads=not self.idle)
        for depth, expected in enumerate(self._reaches if self.depths else ()):
            came, went = (sum(count >= least for count in accepted) for least in (depth, depth + 1))
            self.known.hit.learn(went, came)
            if depth:
                self.known.reach.learn(came, expected)
        for steps, way, count in zip(self._steps, path, accepted):
            taken = dict(zip(way[: count + 1], range(count + 1)))
            for node, step in enumerate(steps[1:], 1):
                if step.parent in taken:
                    curve.learn(step.log_q, taken[step.parent] + 1, step.first, node in taken)
