"""Grow one round's tree by the prices of its shape, choose the nodes to verify, and note what a policy learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_core.tensors import lists
from fsd_infer.tree import DraftTree
from fsd_infer.trees.prices import Kind, Prices
from fsd_infer.trees.shape import TreeShape

UNLIKELY = 0.01  # chance of acceptance below which a draft is ignored
MOST_TOGETHER = 160  # nodes of all trees in a batch


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


@dataclass
class DraftWork:
    """What drafters did in a round whose tree was grown by prices.

    Attributes:
        drafted: whether the model drafted; None: it was not asked, or there is none.
        prices: by which it decided so.
        depths: depths drafted.
        expanded: nodes expanded, over all rows.
        expected_rows: at the expanded nodes of each depth, by their chances.
        steps: of each row's verified tree.
        expected: accepted drafts of all rows, by their chances.
        asked_side: whether grafted drafters were asked; None: there are none.
        side_seconds: of their drafting and of merging their drafts.
        side_first: those of ``side_seconds`` that passed before the model drafted.
        is_choice: whether the tree is the chosen one, rather than one that a grammar forces.
    """

    drafted: bool | None = None
    prices: Prices | None = None
    depths: int = 0
    expanded: int = 0
    expected_rows: list[float] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=list)
    expected: float = 0.0
    asked_side: bool | None = None
    side_seconds: float = 0.0
    side_first: float = 0.0
    is_choice: bool = True


class Growth:
    """The growth of one round's trees: :meth:`starts`, then :meth:`expand` for every depth.

    Args:
        prices: of the round.
        rows: B.
    """

    def __init__(self, prices: Prices, rows: int) -> None:
        self.prices, self.rows = prices, rows
        self.work = DraftWork(prices=prices, expected_rows=[float(rows)])
        self._chances: list[float] = []  # of all drafts of all rows, falling
        self._frontier = [[1.0] for _ in range(rows)]  # chances of each row's nodes that may be expanded next

    def starts(self) -> bool:
        """Return whether this round drafts."""
        self.work.drafted = self.prices.loss <= self.prices.most_loss
        if self.work.drafted:
            self.count_depth(1)
        return self.work.drafted

    def count_depth(self, width: int) -> None:
        """Count one more depth that expands ``width`` nodes of every row."""
        self.work.depths += 1
        self.work.expanded += width * self.rows

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
        calibration, depth, most = self.prices.calibration, self.work.depths, log_q.shape[2]
        best: list[list[int]] = []
        frontier: list[list[float]] = []
        last = torch.zeros_like(log_q[..., 0]) if drawn is None else drawn[..., -1]
        for row, draws, before in zip(log_q.tolist(), last.tolist(), self._frontier):
            chances: list[float] = []
            for steps, draw, above in zip(row, draws, before):
                chances += [above * calibration.chance(step, depth, place == 0) for place, step in enumerate(steps)]
                if draw:
                    chances[-1] = above * calibration.chance(steps[-1], depth, False, Kind.DRAWN)
            order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:most]
            best.append(order)
            frontier.append([chances[place] for place in order])
            self._chances += [chance for chance in chances if chance > UNLIKELY]
        self._chances.sort(reverse=True)
        del self._chances[MOST_TOGETHER:]
        width = self.prices.width(self._chances, frontier)
        if not width:
            return None
        self.count_depth(width)
        self._frontier = [row[:width] for row in frontier]
        self.work.expected_rows.append(sum(min(sum(row), 1.0) for row in self._frontier))
        return torch.tensor([row[:width] for row in best], device=log_q.device)


def kept_all(tree: DraftTree, growth: Growth) -> DraftTree:
    """Return a sampled chain as it is, and note it. Dropping a node would shift the law."""
    growth.work.steps, chances = steps_of(tree, growth.prices)
    growth.work.expected = sum(sum(row[1:]) for row in chances)
    return tree


def chosen(tree: DraftTree, shape: TreeShape, work: DraftWork) -> Tensor:
    """Choose the nodes to verify, and note them in ``work``. Syncs with the device.

    Args:
        tree: all candidates.
        shape: with prices, and the most nodes of a row's tree, the root included.
        work: of the drafters in this round.

    Returns:
        [B, K] node numbers, the root and then the likeliest nodes.
    """
    prices, rows = shape.prices, len(tree.tokens)
    assert prices is not None
    steps, found = steps_of(tree, prices)
    held = torch.zeros_like(tree.is_draft) if tree.held is None else tree.held
    gains, orders, longest, least = [0.0] * shape.nodes, [], 1, 1
    for chances, must in zip(found, held.tolist()):
        # nodes that must be verified, then the likeliest; a parent before its children
        order = sorted(range(1, len(chances)), key=lambda node: (not must[node], -chances[node]))
        orders.append(order)
        least = max(least, 1 + sum(must[1:]))
        longest = max(longest, least, 1 + sum(chance > 0.0 for chance in chances[1:]))
        for drafts, gain in enumerate(accumulate(chances[node] for node in order[: shape.nodes - 1]), 1):
            gains[drafts] += gain
    most = min(shape.nodes, longest, max(MOST_TOGETHER // rows, 2, least))
    sizes = range(max(least, prices.fewest if work.drafted else 1), most + 1) or range(1, most + 1)
    nodes = max(sizes, key=lambda n: gains[n - 1] - prices.of_nodes(n * rows))
    kept = [
        [0, *sorted(sorted(order[: nodes - 1]), key=lambda node: -chances[node])]
        for chances, order in zip(found, orders)
    ]
    work.expected, work.steps = gains[nodes - 1], []
    for each, row in zip(steps, kept):
        number = {node: place for place, node in enumerate(row)}
        work.steps.append([each[node]._replace(parent=number[each[node].parent]) for node in row])
    return torch.tensor(kept, device=tree.parents.device)


def steps_of(tree: DraftTree, prices: Prices) -> tuple[list[list[Step]], list[list[float]]]:
    """Return every row's steps and chances of acceptance by node."""
    kinds = torch.zeros_like(tree.parents)
    if tree.proposers is not None:
        kinds = kinds.masked_fill(tree.proposers > 0, int(Kind.GRAFTED))
    if tree.drawn is not None:
        kinds = kinds.masked_fill(tree.drawn, int(Kind.DRAWN))
    rows = zip(*lists(tree.scores, tree.parents, kinds))
    found = [_steps_of_row(scores, parents, kind, prices) for scores, parents, kind in rows]
    return [steps for steps, _ in found], [chances for _, chances in found]


def _steps_of_row(
    scores: Sequence[float], parents: Sequence[int], kinds: Sequence[int], prices: Prices
) -> tuple[list[Step], list[float]]:
    firsts: dict[int, int] = {}  # the likeliest child of each inner node
    for node in range(1, len(scores)):
        best = firsts.setdefault(parents[node], node)
        if scores[node] > scores[best]:
            firsts[parents[node]] = node
    steps, chances, depths = [Step(0, 0.0, False)], [1.0] * len(scores), [0] * len(scores)
    for node in range(1, len(scores)):
        parent, kind = parents[node], Kind(kinds[node])
        depths[node] = depths[parent] + 1
        step = Step(parent, scores[node] - scores[parent], firsts[parent] == node and kind != Kind.DRAWN, kind)
        steps.append(step)
        above = chances[parent]
        of_step = prices.calibration.chance(step.log_q, depths[node], step.first, kind)
        chances[node] = above * of_step if above > UNLIKELY else 0.0
    return steps, chances
