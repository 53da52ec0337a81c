"""Merge the trees of two drafters under one limit of nodes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_infer.cpu import ops
from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession
from fsd_infer.drafters.visits import likeliest, path_sums
from fsd_infer.tree import DraftTree

LEAST_WRONG = 0.001  # chance that all steps of the main drafter from a node are wrong


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

    **Merging.** A side node whose path of tokens exists in the main tree is the same node. The drafters are taken to
    err independently. If both propose a step, with chances a and b, its chance is 1 - (1 - a)(1 - b). If only ``side``
    proposes it, b is multiplied by the chance that all steps of ``main`` from this node are wrong. Chances of siblings
    are scaled down if they add up to more than 1. A node's score is the sum of the log chances on its path. The nodes
    with the likeliest visits are kept (:mod:`fsd_infer.drafters.visits`). They form a tree.

    **Rules.** Under the exact rule the law is p, as on any deterministic tree. Nodes that only ``side`` proposes have
    no q, so gates stay closed there. A node of ``main`` keeps its q if its likeliest child under ``main`` is kept. The
    law of `fuzzy` at an open gate is p(· | C), where C holds all kept children. Grafted children raise p(C), so the law
    comes closer to p and spends less. Without the likeliest child, C could be a grafted token that both models find
    unlikely. A gate that opens because the models agree would force that token. So the node loses its q, and its gate
    stays closed.

    **Sampled chains.** The exact test of a sampled draft allows no second child. So a small LM at temperatures above 0
    drafts alone.

    Args:
        main: the drafter whose distributions q are kept.
        side: the drafter whose nodes are merged into the tree of ``main``, without its q.
        nodes: nodes verified per round, the root included (default: those of ``main``).

    Raises:
        FsdError: fewer than 2 nodes.
    """

    name = "graft"

    def __init__(self, main: Drafter, side: Drafter, nodes: int | None = None) -> None:
        self.main, self.side = main, side
        self.nodes = main.max_nodes if nodes is None else nodes
        if self.nodes < 2:
            raise FsdError(f"a grafted tree needs at least 2 nodes, got {self.nodes}. Give nodes.")
        self.name = f"{main.name}+{side.name}"
        self.target = main.target

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        return self.main, self.side

    @property
    def proposers(self) -> tuple[str, ...]:
        return self.main.proposers + self.side.proposers

    @property
    def max_nodes(self) -> int:
        return max(self.nodes, self.main.max_nodes)  # a sampled chain of main is kept whole

    @property
    def max_depth(self) -> int:
        return max(self.main.max_depth, self.side.max_depth)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> GraftedSession:
        return GraftedSession(self, first_tokens, request)

    def for_law(self, tilt: float) -> Drafter:
        main = self.main.for_law(tilt)
        if main is self.main:
            return self
        more = max(self.nodes - self.main.max_nodes, 0)  # nodes reserved for the side
        return GraftedDrafter(main, self.side, min(max(self.nodes, main.max_nodes), main.max_nodes + more))

    def describe(self) -> dict[str, Any]:
        parts = {"main": self.main.describe(), "side": self.side.describe()}
        return {"name": self.name, "nodes": self.nodes, "depth": self.max_depth, **parts}


class GraftedSession(DraftSession):
    """A session of both drafters."""

    def __init__(self, drafter: GraftedDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.tilt, self.auto = drafter, request.tilt, request.auto
        self.main = drafter.main.start(first_tokens, request)
        # the side's nodes are chosen here
        self.side = drafter.side.start(first_tokens, replace(request, auto=None, draws=False))
        self.parts = [self.main, self.side]

    def draft(self, roots: Tensor) -> DraftTree:
        drafter, side = self.drafter, self.side.draft(roots)
        if self.auto is not None and not side.sampled:
            self.auto.cover(side)
        main = self.main.draft(roots)
        for tree, part in ((main, drafter.main), (side, drafter.side)):
            if tree.sampled and tree.drawn is None:
                _warn_sampled(part.name)
                return main
        union = union_of(main, side, drafter.max_depth, len(drafter.main.proposers))
        union.levels = drafter.max_depth
        if self.auto is not None:
            return kept_of(union, main, self.auto.keep(union))
        nodes = likeliest(union.scores, union.parents, drafter.max_depth, self.tilt, drafter.nodes, union.held)
        if nodes.device.type == "cpu":  # drop padding; on other devices a sync would cost more than it
            nodes = nodes[:, : 1 + int(union.is_draft.sum(1).max())]
        return kept_of(union, main, nodes)


def union_of(main: DraftTree, side: DraftTree, depth: int, mains: int = 1) -> DraftTree:
    """Return all nodes of two trees with the same roots, as :class:`GraftedDrafter` merges them.

    The nodes of ``main`` come first, then those of ``side``. Nodes of ``side`` that are in ``main`` are padding.

    Args:
        main: a tree that is not sampled, [B, N].
        side: a tree that is not sampled, [B, M].
        depth: at least that of the deepest node.
        mains: number of drafters that propose nodes of ``main``.

    Returns:
        The union, [B, N + M - 1].
    """
    found = ops.tree_union(_parts(main), _parts(side), mains) or _union_in_torch(main, side, depth, mains)
    tokens, parents, scores, proposers = found
    more = parents.shape[1] - main.parents.shape[1]
    q_index = torch.nn.functional.pad(main.q_index, (0, more), value=-1)
    drawn = None if main.drawn is None else torch.nn.functional.pad(main.drawn, (0, more))
    return replace(
        main, tokens=tokens, parents=parents, scores=scores, q_index=q_index, proposers=proposers, drawn=drawn
    )


def _parts(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return tree.tokens, tree.parents, tree.scores, tree.proposers


def _union_in_torch(main: DraftTree, side: DraftTree, depth: int, mains: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`union_of` on any device: tokens, parents, scores and proposers."""
    place, shared = _places(main, side, depth)
    parents = torch.cat([main.parents, place.gather(1, side.parents)[:, 1:]], 1)
    of_main, of_side = _chances(main), _chances(side)
    wrong = torch.ones_like(parents, dtype=of_main.dtype).scatter_add(1, main.parents[:, 1:], -of_main[:, 1:])
    alone = of_side.masked_fill(shared, 0.0) * wrong.clamp_min(LEAST_WRONG).gather(1, place.gather(1, side.parents))
    one = torch.cat([of_main, alone[:, 1:]], 1)
    other = torch.zeros_like(one).scatter(1, place, of_side.masked_fill(~shared, 0.0))
    chance = one + other - one * other
    total = torch.zeros_like(chance).scatter_add(1, parents[:, 1:], chance[:, 1:]).clamp_min(1.0)
    steps = (chance / total.gather(1, parents)).clamp_max(1.0).log()
    steps[:, 0] = 0.0
    proposers = [torch.zeros_like(tree.parents) if tree.proposers is None else tree.proposers for tree in (main, side)]
    tokens = torch.cat([main.tokens, side.tokens[:, 1:]], 1)
    return tokens, parents, path_sums(steps, parents, depth), torch.cat([proposers[0], proposers[1][:, 1:] + mains], 1)


def kept_of(union: DraftTree, main: DraftTree, nodes: Tensor) -> DraftTree:
    """Return the tree of some nodes of a union. A node loses its q if its likeliest child under ``main`` is dropped.

    Args:
        union: from :func:`union_of`.
        main: the main tree.
        nodes: [B, K] node numbers of the union, as for :meth:`DraftTree.keep`.
    """
    kept = torch.zeros_like(union.parents, dtype=torch.bool).scatter(1, nodes, True)
    first = main.first_choices
    has_first = kept.gather(1, first.clamp_min(0)) & (first >= 0)
    if main.drawn is not None:
        has_first |= (main.child & main.drawn[:, None]).any(-1)
    q_index = union.q_index.clone()
    q_index[:, : main.parents.shape[1]].masked_fill_(~has_first, -1)
    return replace(union, q_index=q_index).keep(nodes)


def _chances(tree: DraftTree) -> Tensor:
    """Return each node's chance given its parent: [B, N], 0 at padding."""
    return (tree.scores - tree.scores.gather(1, tree.parents)).clamp_max(0.0).exp()


def _places(main: DraftTree, side: DraftTree, depth: int) -> tuple[Tensor, Tensor]:
    """Return each side node's place in the union and whether it is a node of ``main``: [B, M] each."""
    count, others = main.parents.shape[1], side.parents.shape[1]
    same = (main.tokens[:, :, None] == side.tokens[:, None]) & main.is_draft[:, :, None] & side.is_draft[:, None]
    same[:, 0, 0] = True
    # Two nodes are one if their tokens are equal and their parents are one.
    same, above = same.flatten(1), (main.parents[:, :, None] * others + side.parents[:, None]).flatten(1)
    for _ in range(depth.bit_length()):  # each pass doubles the compared part of the paths
        same, above = same & same.gather(1, above), above.gather(1, above)
    shared, place = same.view(-1, count, others).int().max(1)
    own = torch.arange(count - 1, count - 1 + others, device=place.device)
    return torch.where(shared > 0, place, own), shared > 0
