"""Grow one round's tree by the prices of its shape, choose the nodes to verify, and note what a policy learns from."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_core.tensors import lists
from fsd_infer.trees.prices import Kind
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree

UNLIKELY = 0.01  # probability of acceptance below which a draft is ignored
MOST_TOGETHER = 160  # nodes of all trees in a batch


class DraftStep(NamedTuple):
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


class Growth:
    """How one round's trees are grown: :meth:`starts`, :meth:`expand` for every depth, then :meth:`choose`.

    Args:
        shape: of the trees, with prices.
        rows: B.

    Attributes:
        prices: of the shape.
        drafted: whether the model drafted; None: it was not asked, or there is none.
        depths: depths drafted.
        expanded: nodes expanded, over all rows.
        expected_rows: at the expanded nodes of each depth, by their probabilities.
        steps: of each row's verified tree.
        expected: accepted drafts of all rows, by their probabilities.
        asked_side: whether grafted drafters were asked; None: there are none.
        side_seconds: of their drafting and of merging their drafts.
        is_choice: whether the trees are the chosen ones and were accepted as far as the rule allowed.
    """

    def __init__(self, shape: TreeShape, rows: int) -> None:
        assert shape.prices is not None
        self.prices, self.rows, self.nodes = shape.prices, rows, shape.nodes
        self.drafted: bool | None = None
        self.depths = self.expanded = 0
        self.expected_rows = [float(rows)]
        self.steps: list[list[DraftStep]] = []
        self.expected = self.side_seconds = 0.0
        self.asked_side: bool | None = None
        self.is_choice = True
        self._probs: list[float] = []  # of acceptance, of all drafts of all rows, falling
        self._frontier = [
            [1.0] for _ in range(rows)
        ]  # probability of acceptance of each row's nodes that may be expanded next

    def starts(self) -> bool:
        """Return whether this round drafts."""
        self.drafted = self.prices.loss <= self.prices.max_loss
        if self.drafted:
            self.count_depth(1)
        return self.drafted

    def count_depth(self, width: int) -> None:
        """Count one more depth that expands ``width`` nodes of every row."""
        self.depths += 1
        self.expanded += width * self.rows

    def accept_log_probs(self, scores: Tensor) -> Tensor:
        """Return the log-probability that each node that was expanded last is accepted: [B, E], as ``scores``."""
        return torch.tensor(self._frontier, dtype=scores.dtype, device=scores.device).log()

    def expand(self, log_q: Tensor, drawn: Tensor | None = None) -> Tensor | None:
        """Choose which candidates of this depth to expand.

        Args:
            log_q: [B, E, w] ln q of the candidates under the nodes that were expanded last, falling along w.
            drawn: [B, E, w] which of them were drawn; None: none.

        Returns:
            [B, E'] places among a row's E · w candidates, the likeliest first; None if drafting stops here.
        """
        calibration, depth, most = self.prices.calibration, self.depths, log_q.shape[2]
        best: list[list[int]] = []
        frontier: list[list[float]] = []
        last = torch.zeros_like(log_q[..., 0]) if drawn is None else drawn[..., -1]
        for row, draws, before in zip(log_q.tolist(), last.tolist(), self._frontier):
            probs: list[float] = []
            for steps, draw, above in zip(row, draws, before):
                probs += [above * calibration.accept_prob(step, depth, place == 0) for place, step in enumerate(steps)]
                if draw:
                    probs[-1] = above * calibration.accept_prob(steps[-1], depth, False, Kind.DRAWN)
            order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)[:most]
            best.append(order)
            frontier.append([probs[place] for place in order])
            self._probs += [prob for prob in probs if prob > UNLIKELY]
        self._probs.sort(reverse=True)
        del self._probs[MOST_TOGETHER:]
        width = self.prices.width(self._probs, frontier)
        if not width:
            return None
        self.count_depth(width)
        self._frontier = [row[:width] for row in frontier]
        self.expected_rows.append(sum(min(sum(row), 1.0) for row in self._frontier))
        return torch.tensor([row[:width] for row in best], device=log_q.device)

    def choose(self, tree: DraftTree) -> Tensor:
        """Return [B, K] numbers of the nodes to verify, the root and then the likeliest. Syncs with the device."""
        found = self._steps_of(tree)
        pinned = (torch.zeros_like(tree.is_draft) if tree.pinned is None else tree.pinned).tolist()
        orders = []  # each row's nodes: those that must be verified, then the likeliest; a parent before its children
        for (_, probs), must in zip(found, pinned):
            orders.append(sorted(range(1, len(probs)), key=lambda node: (not must[node], -probs[node])))
        size, self.expected = self._best_size(orders, [probs for _, probs in found], pinned)
        self.steps, kept = [], []
        for (steps, probs), order in zip(found, orders):
            row = [0, *sorted(sorted(order[: size - 1]), key=lambda node: -probs[node])]
            number = {node: place for place, node in enumerate(row)}
            self.steps.append([steps[node]._replace(parent=number[steps[node].parent]) for node in row])
            kept.append(row)
        return torch.tensor(kept, device=tree.parents.device)

    def _best_size(
        self, orders: list[list[int]], probs: list[list[float]], pinned: list[list[bool]]
    ) -> tuple[int, float]:
        """Return how many nodes of each row to verify, and how many drafts of all rows are then accepted, as expected.

        Args:
            orders: [B] each row's drafts, those to verify first.
            probs: [B][N] of acceptance.
            pinned: [B][N] which must be verified.
        """
        gains, longest, least = [0.0] * self.nodes, 1, 1  # accepted drafts of all rows, by the number of drafts
        for order, of_node, must in zip(orders, probs, pinned):
            least = max(least, 1 + sum(must[1:]))
            longest = max(longest, least, 1 + sum(prob > 0.0 for prob in of_node[1:]))
            for drafts, gain in enumerate(accumulate(of_node[node] for node in order[: self.nodes - 1]), 1):
                gains[drafts] += gain
        most = min(self.nodes, longest, max(MOST_TOGETHER // self.rows, 2, least))
        sizes = range(max(least, self.prices.min_nodes if self.drafted else 1), most + 1) or range(1, most + 1)
        size = max(sizes, key=lambda n: gains[n - 1] - self.prices.verify_price(n * self.rows))
        return size, gains[size - 1]

    def note(self, tree: DraftTree) -> None:
        """Note a sampled chain, which is verified as it is. Dropping a node would shift the distribution."""
        found = self._steps_of(tree)
        self.steps, self.expected = [steps for steps, _ in found], sum(sum(probs[1:]) for _, probs in found)

    def _steps_of(self, tree: DraftTree) -> list[tuple[list[DraftStep], list[float]]]:
        """Return every row's steps and probs of acceptance by node."""
        kinds = torch.zeros_like(tree.parents)
        if tree.proposers is not None:
            kinds = kinds.masked_fill(tree.proposers > 0, int(Kind.GRAFTED))
        if tree.drawn is not None:
            kinds = kinds.masked_fill(tree.drawn, int(Kind.DRAWN))
        found = []
        for scores, parents, kind in zip(*lists(tree.scores, tree.parents, kinds)):
            firsts: dict[int, int] = {}  # the likeliest child of each inner node
            for node in range(1, len(scores)):
                best = firsts.setdefault(parents[node], node)
                if scores[node] > scores[best]:
                    firsts[parents[node]] = node
            steps, probs, depths = [DraftStep(0, 0.0, False)], [1.0] * len(scores), [0] * len(scores)
            for node in range(1, len(scores)):
                parent = parents[node]
                depths[node] = depths[parent] + 1
                first = firsts[parent] == node and kind[node] != Kind.DRAWN
                step = DraftStep(parent, scores[node] - scores[parent], first, Kind(kind[node]))
                steps.append(step)
                above = probs[parent]
                of_step = self.prices.calibration.accept_prob(step.log_q, depths[node], step.first, step.kind)
                probs[node] = above * of_step if above > UNLIKELY else 0.0
            found.append((steps, probs))
        return found
