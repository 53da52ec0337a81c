"""Grow one round's tree by the prices of its shape, choose the nodes to verify, and note what a policy learns from."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_core.errors import NonFiniteLogitsError
from fsd_core.tensors import lists
from fsd_infer.trees.calibration import DraftKind
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree

UNLIKELY = 0.01  # probability of acceptance below which a draft is ignored
MAX_BATCH_NODES = 160  # of all trees in a batch


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
    kind: DraftKind = DraftKind.LIKELY


class PricedGrowth:
    """How one round's trees are grown: :meth:`starts`, :meth:`expand` for every depth, then :meth:`choose`.

    Args:
        shape: shape of the trees, with prices.
        rows: B.

    Attributes:
        prices: prices of the shape.
        drafted: whether the model drafted; None: it was not asked, or there is none.
        depths: depths drafted.
        expanded: nodes expanded, over all rows.
        expected_rows: at the expanded nodes of each depth, by their probabilities.
        steps: the steps of each row's verified tree.
        expected: accepted drafts of all rows, by their probabilities.
        asked_grafted: whether grafted drafters were asked; None: there are none.
        grafted_seconds: time of their drafting and of merging their drafts.
        is_choice: whether the trees are the chosen ones and were accepted as far as the rule allowed.
    """

    def __init__(self, shape: TreeShape, rows: int) -> None:
        assert shape.prices is not None
        self.prices, self.rows, self.nodes = shape.prices, rows, shape.nodes
        self.drafted: bool | None = None
        self.depths = self.expanded = 0
        self.expected_rows = [float(rows)]
        self.steps: list[list[DraftStep]] = []
        self.expected = self.grafted_seconds = 0.0
        self.asked_grafted: bool | None = None
        self.is_choice = True
        self._probs: list[float] = []  # probabilities of acceptance of all drafts of all rows, falling
        # probability of acceptance of each row's nodes that may be expanded next
        self._frontier = [[1.0] for _ in range(rows)]

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
            [B, E'] indices among a row's E · w candidates, the likeliest first; None if drafting stops here.
        """
        best: list[list[int]] = []
        frontier: list[list[float]] = []
        last_drawn = _nowhere(log_q) if drawn is None else drawn[..., -1].tolist()
        for row, draws, accept_probs in zip(log_q.tolist(), last_drawn, self._frontier):
            probs = [prob for parent in zip(row, draws, accept_probs) for prob in self._child_probs(*parent)]
            order = sorted(range(len(probs)), key=probs.__getitem__, reverse=True)[: log_q.shape[2]]
            best.append(order)
            frontier.append([probs[index] for index in order])
            self._probs += [prob for prob in probs if prob > UNLIKELY]
        self._probs.sort(reverse=True)
        del self._probs[MAX_BATCH_NODES:]
        width = self.prices.width(self._probs, frontier)
        if not width:
            return None
        self.count_depth(width)
        self._frontier = [row[:width] for row in frontier]
        self.expected_rows.append(sum(min(sum(row), 1.0) for row in self._frontier))
        return torch.tensor([row[:width] for row in best], device=log_q.device)

    def _child_probs(self, log_q: list[float], draws: bool, parent_prob: float) -> list[float]:
        """Return how likely each child of a node is accepted.

        Args:
            log_q: [w] ln q of the children, falling.
            draws: whether the last one was drawn.
            parent_prob: probability that the node is accepted.
        """
        calibration, depth = self.prices.calibration, self.depths
        probs = [parent_prob * calibration.accept_prob(step, depth, rank == 0) for rank, step in enumerate(log_q)]
        if draws:
            probs[-1] = parent_prob * calibration.accept_prob(log_q[-1], depth, False, DraftKind.DRAWN)
        return probs

    def choose(self, tree: DraftTree) -> Tensor:
        """Return [B, K] indices of the nodes to verify, the root and then the likeliest. Syncs with the device."""
        rows = self._steps_of(tree)
        pinned = _nowhere(tree.parents) if tree.pinned is None else tree.pinned.tolist()
        orders = []  # each row's nodes: those that must be verified, then the likeliest; a parent before its children
        for (_, probs), must in zip(rows, pinned):
            orders.append(sorted(range(1, len(probs)), key=lambda node: (not must[node], -probs[node])))
        size, self.expected = self._best_size(orders, [probs for _, probs in rows], pinned)
        self.steps, kept = [], []
        for (steps, probs), order in zip(rows, orders):
            row = [0, *sorted(sorted(order[: size - 1]), key=lambda node: -probs[node])]
            index = {node: new for new, node in enumerate(row)}
            self.steps.append([DraftStep(index[steps[node].parent], *steps[node][1:]) for node in row])
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
        gains, longest, must_keep = [0.0] * self.nodes, 1, 1  # accepted drafts of all rows, by the number of drafts
        for order, row_probs, must in zip(orders, probs, pinned):
            must_keep = max(must_keep, 1 + sum(must[1:]))
            longest = max(longest, must_keep, 1 + sum(prob > 0.0 for prob in row_probs[1:]))
            for drafts, gain in enumerate(accumulate(row_probs[node] for node in order[: self.nodes - 1]), 1):
                gains[drafts] += gain
        limit = min(self.nodes, longest, max(MAX_BATCH_NODES // self.rows, 2, must_keep))
        fewest = max(must_keep, self.prices.min_nodes if self.drafted else 1)
        sizes = range(fewest, limit + 1) or range(1, limit + 1)
        size = max(sizes, key=lambda n: gains[n - 1] - self.prices.verify_price(n * self.rows))
        return size, gains[size - 1]

    def note(self, tree: DraftTree) -> None:
        """Note a sampled chain, which is verified as it is. Dropping a node would shift the distribution."""
        rows = self._steps_of(tree)
        self.steps, self.expected = [steps for steps, _ in rows], sum(sum(probs[1:]) for _, probs in rows)

    def _steps_of(self, tree: DraftTree) -> list[tuple[list[DraftStep], list[float]]]:
        """Return every row's steps, and how likely each node is accepted."""
        nowhere, accept_prob = _nowhere(tree.parents), self.prices.calibration.accept_prob
        grafted = nowhere if tree.proposers is None else (tree.proposers > 0).tolist()
        drawn = nowhere if tree.drawn is None else tree.drawn.tolist()
        rows: list[tuple[list[DraftStep], list[float]]] = []
        for row, (scores, parents, is_grafted, is_drawn) in enumerate(
            zip(*lists(tree.scores, tree.parents), grafted, drawn)
        ):
            if any(map(math.isnan, scores)):  # else such drafts would be dropped unnoticed
                raise NonFiniteLogitsError(
                    f"the drafter's logits in row {row} are NaN, +inf or all -inf. Check its weights and dtype (fp16 "
                    "overflows; bf16 or fp32 do not)."
                )
            firsts: dict[int, int] = {}  # the likeliest child of each inner node
            for node in range(1, len(scores)):
                best = firsts.setdefault(parents[node], node)
                if scores[node] > scores[best]:
                    firsts[parents[node]] = node
            steps, probs, depths = [DraftStep(0, 0.0, False)], [1.0] * len(scores), [0] * len(scores)
            for node in range(1, len(scores)):
                parent = parents[node]
                depths[node] = depths[parent] + 1
                likely = DraftKind.GRAFTED if is_grafted[node] else DraftKind.LIKELY
                kind = DraftKind.DRAWN if is_drawn[node] else likely
                first = firsts[parent] == node and not is_drawn[node]
                step = DraftStep(parent, scores[node] - scores[parent], first, kind)
                steps.append(step)
                reached = probs[parent]
                probs[node] = (
                    reached * accept_prob(step.log_q, depths[node], first, kind) if reached > UNLIKELY else 0.0
                )
            rows.append((steps, probs))
        return rows


def _nowhere(nodes: Tensor) -> list[list[bool]]:
    """Return False for each of some nodes [B, N, ...], as lists."""
    return [[False] * nodes.shape[1]] * nodes.shape[0]
