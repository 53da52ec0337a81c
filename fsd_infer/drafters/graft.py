"""Merge the trees of two drafters under one limit of nodes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.errors import FsdError
from fsd_core.former import former_keywords
from fsd_infer.drafters.base import DRAFTERS, Drafter
from fsd_infer.drafters.free import likeliest_of
from fsd_infer.drafters.frontier import Frontier, Successors
from fsd_infer.drafters.session import DraftRequest, DraftSession
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree, Draws, select_nodes


@cache
def _warn_sampled(name: str) -> None:
    warnings.warn(
        f"{name} samples its drafts at temperatures above 0. Sampled drafts cannot be merged, so the main drafter "
        "drafts alone.",
        stacklevel=2,
    )


@DRAFTERS.register("graft")
class GraftedDrafter(Drafter):
    """A drafter that merges the trees of two drafters and keeps the best nodes. Named "X+memory", for any drafter X.

    **Merging.** A grafted node whose path of tokens exists in the main tree is the same node. The drafters are taken to
    err independently. If both propose a child, with probabilities a and b of acceptance, its own is 1 - (1 - a)(1 - b).
    If only ``grafted`` proposes it, b is multiplied by the probability that all children that ``main`` proposes there
    are wrong. Siblings are scaled down if they add up to more than 1. A node's score is the log-probability of its
    path. The nodes with the likeliest visits are kept (:mod:`fsd_infer.trees.tree`). They form a tree.

    **Rules.** Under the exact rule the distribution is p, as on any deterministic tree. Nodes that only the grafted
    drafter proposes have no q, so gates stay closed there. A node of ``main`` keeps its q if its likeliest child under
    ``main`` is kept. The distribution of `fuzzy` at an open gate is p(· | C), where C holds all kept children. Grafted
    children raise p(C), so the distribution comes closer to p and spends less. Without the likeliest child, C could be
    a grafted token that both models find unlikely. A gate that opens because the models agree would force that token.
    So the node loses its q, and its gate stays closed.

    **Drawn chains.** The test of a chain that is drawn from q allows no second child. So ``main`` drafts alone if the
    rule asks for chains (``exact:block=true``). By default drafts are drawn as nodes of its tree, which is merged.

    Args:
        main: the drafter whose distributions q are kept.
        grafted: the drafter whose nodes are merged into the tree of ``main``, without its q.
        nodes: nodes verified per round, the root included (default: those of ``main``).

    Raises:
        FsdError: fewer than 2 nodes.
    """

    name = "graft"
    former_members = {"side": "grafted"}

    @former_keywords(side="grafted")
    def __init__(self, main: Drafter, grafted: Drafter, nodes: int | None = None) -> None:
        self.main, self.grafted = main, grafted
        self.nodes = main.max_nodes if nodes is None else nodes
        if self.nodes < 2:
            raise FsdError(f"a grafted tree needs at least 2 nodes, got {self.nodes}. Give nodes.")
        self.name = f"{main.name}+{grafted.name}"
        self.target = main.target

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        return self.main, self.grafted

    @property
    def relative_cost(self) -> float | None:  # type: ignore[override]
        return self.main.relative_cost

    @property
    def recording_key(self) -> Hashable:
        return type(self), self.main.recording_key, self.grafted.recording_key, self.nodes, self.menu

    @property
    def proposers(self) -> tuple[str, ...]:
        return self.main.proposers + self.grafted.proposers

    @property
    def max_nodes(self) -> int:
        return max(self.nodes, self.main.max_nodes)  # a sampled chain of main is kept whole

    @property
    def max_depth(self) -> int:
        return max(self.main.max_depth, self.grafted.max_depth)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> GraftedSession:
        return GraftedSession(self, first_tokens, request)

    def for_bonus(self, draft_bonus: float) -> Drafter:
        main = self.main.for_bonus(draft_bonus)
        if main is self.main:
            return self
        more = max(self.nodes - self.main.max_nodes, 0)  # nodes reserved for the grafted drafter
        return GraftedDrafter(main, self.grafted, min(max(self.nodes, main.max_nodes), main.max_nodes + more))

    def with_shape(self, shape: TreeShape) -> GraftedDrafter:
        main = self.main.with_shape(shape)
        nodes = max(shape.nodes, main.max_nodes)
        result = GraftedDrafter(main, self.grafted.with_shape(replace(shape, nodes=nodes)), nodes)
        result.directory = self.directory
        return result

    def describe(self) -> dict[str, Any]:
        parts = {"main": self.main.describe(), "side": self.grafted.describe()}  # the key of records
        return {"name": self.name, "nodes": self.nodes, "depth": self.max_depth, **parts}


class GraftedSession(DraftSession):
    """A session of both drafters."""

    def __init__(self, drafter: GraftedDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.draft_bonus, self.shape = drafter, request.draft_bonus, request.shape
        self.clock = request.clock or (lambda: 0.0)
        # the nodes of the grafted drafter are chosen here
        grafted = drafter.grafted.start(first_tokens, replace(request, shape=None, menu=(), draws=Draws.NONE))
        self.parts = [drafter.main.start(first_tokens, request), grafted]

    @property
    def main(self) -> DraftSession:
        return self.parts[0]

    @property
    def grafted(self) -> DraftSession:
        return self.parts[1]

    @property
    def is_recordable(self) -> bool:
        return self.prices is None and self.main.is_recordable and self.grafted.is_recordable

    @property
    def shape_key(self) -> Hashable:
        return self.shape, super().shape_key

    def draft(self, roots: Tensor) -> DraftTree:
        shape, prices = self.shape, self.prices
        if shape is not None:
            self.main.shape = shape
            if prices is not None and not prices.asks_grafted:
                return self._draft_main(roots)
        began = self.clock()
        grafted = self.grafted.draft(roots)
        seconds = self.clock() - began
        if shape is not None and prices is not None and not grafted.sampled:
            self.main.shape = replace(shape, prices=prices.given_grafted(grafted))
        main = self._draft_main(roots, seconds)
        for tree, drafter in zip((main, grafted), self.drafter.parts, strict=True):
            if tree.sampled and tree.drawn is None:
                _warn_sampled(drafter.name)
                return main
        return self._merge(main, grafted)

    def _draft_main(self, roots: Tensor, seconds: float | None = None) -> DraftTree:
        """Return the main drafter's tree. ``seconds``: how long the grafted drafter took; None: it did not draft."""
        tree, self.growth = self.main.draft(roots), self.main.growth
        if self.growth is not None:
            self.growth.asked_grafted = seconds is not None
            self.growth.grafted_seconds += seconds or 0.0
        return tree

    def _merge(self, main: DraftTree, grafted: DraftTree) -> DraftTree:
        """Return the best nodes of both trees."""
        drafter, began = self.drafter, self.clock()
        union = union_of(main, grafted, drafter.max_depth, len(drafter.main.proposers))
        if self.growth is not None:
            self.growth.grafted_seconds += self.clock() - began
            return keep_nodes(union, main, self.growth.choose(union))
        most = drafter.nodes if self.shape is None else self.shape.nodes
        assert union.proposers is not None
        # the grafted drafter's own nodes are mostly copies of a text, which lossy rules test exactly by default
        bonus = self.draft_bonus * (union.proposers < len(drafter.main.proposers)) if self.draft_bonus else 0.0
        return self._best(union, main, bonus, most)

    def _best(self, union: DraftTree, main: DraftTree, draft_bonus: float | Tensor, most: int) -> DraftTree:
        """Return the likeliest ``most`` nodes of a union, without padding where the host can tell."""
        nodes = select_nodes(union.scores, union.parents, self.drafter.max_depth, draft_bonus, most, union.pinned)
        return keep_nodes(union, main, nodes[:, : 1 + functional.host_max(union.is_draft.sum(1), nodes.shape[1] - 1)])

    def successors(self, frontier: Frontier, nodes: Sequence[Sequence[int]], count: int) -> list[list[Successors]]:
        proposed = [session.successors(frontier, nodes, count) for session in self._beam_sessions()]
        return [
            [_union_of_successors(lists, count) for lists in zip(*rows, strict=True)]
            for rows in zip(*proposed, strict=True)
        ]

    def follow_beams(self, frontier: Frontier, nodes: Sequence[Sequence[int]], grown: Sequence[int]) -> None:
        for session in self._beam_sessions():
            session.follow_beams(frontier, nodes, grown)

    def _beam_sessions(self) -> list[DraftSession]:
        pairs = zip(self.parts, self.drafter.parts, strict=True)
        return [session for session, drafter in pairs if drafter.drafts_beams]


def _union_of_successors(lists: Sequence[Successors], count: int) -> Successors:
    """Return the likeliest tokens that either drafter proposes. One that both do has probability 1 - (1 - a)(1 - b)."""
    wrong: dict[int, float] = {}  # the probability that each token is not the next one
    for log_prob, token in (pair for successors in lists for pair in zip(*successors)):
        wrong[token] = wrong.get(token, 1.0) * (1.0 - math.exp(min(log_prob, 0.0)))
    return likeliest_of([(token, 1.0 - value) for token, value in wrong.items() if value < 1.0], count)


def union_of(main: DraftTree, grafted: DraftTree, depth: int, main_proposers: int = 1) -> DraftTree:
    """Return all nodes of two trees with the same roots, as :class:`GraftedDrafter` merges them.

    The nodes of ``main`` come first, then those of ``grafted``. Nodes of ``grafted`` that are in ``main`` are padding.

    Args:
        main: a tree, but no drawn chain, [B, N].
        grafted: a tree that is not sampled, [B, M].
        depth: at least that of the deepest node.
        main_proposers: number of drafters that propose nodes of ``main``.

    Returns:
        The union, [B, N + M - 1].
    """
    tokens, parents, scores, proposers = functional.tree_union(_parts(main), _parts(grafted), main_proposers, depth)
    base = main.padded_to(tokens.shape[1])
    return replace(base, tokens=tokens, parents=parents, scores=scores, proposers=proposers, depth_bound=depth)


def _parts(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return tree.tokens, tree.parents, tree.scores, tree.proposers


def keep_nodes(union: DraftTree, main: DraftTree, nodes: Tensor) -> DraftTree:
    """Return the tree of some nodes of a union. A node loses its q if its likeliest child under ``main`` is dropped.

    Args:
        union: from :func:`union_of`.
        main: the main tree.
        nodes: [B, K] node numbers of the union, as for :meth:`DraftTree.keep`.
    """
    is_kept = torch.zeros_like(union.parents, dtype=torch.bool).scatter(1, nodes, True)
    first = main.first_choices
    has_first = is_kept.gather(1, first.clamp_min(0)) & (first >= 0)
    if main.pinned is not None:  # whether a context above a drawn node has a q must not depend on what was drawn
        has_first |= main.pinned
    q_index = union.q_index.clone()
    q_index[:, : main.parents.shape[1]].masked_fill_(~has_first, -1)
    return replace(union, q_index=q_index).keep(nodes)
