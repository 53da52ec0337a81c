"""The union of two drafters' trees under one budget of nodes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession, NoDrafter
from fsd_infer.drafters.visits import likeliest, path_sums
from fsd_infer.errors import FsdError
from fsd_infer.tree import DraftTree


@cache
def _warn_sampled(name: str) -> None:
    warnings.warn(
        f"{name} samples its drafts at temperature above 0, and a sampled chain takes no graft: it drafts alone.",
        stacklevel=2,
    )


@DRAFTERS.register("graft")
class GraftedDrafter(Drafter):
    """Two drafters' trees merged, the best nodes of both kept. By name: "X+memory", X any drafter's name.

    A side node whose path of tokens is in the main tree is the same node. The chance of a step that both propose is
    1 - (1 - a)(1 - b), as if they erred independently; the chances of siblings are scaled down where they add up to
    more than 1. A node's score is the sum of its path's log chances. The ``nodes`` that are visited most likely are
    kept (:mod:`fsd_infer.drafters.visits`), which always form a tree.

    Rules: the exact rule's law is the target's, as on any deterministic tree. Nodes that only ``side`` proposed have no
    q: every gate is closed there. A node of ``main`` keeps its q, hence its gate, as long as the child that ``main``
    likes best is among the kept ones, as it is in every tree of ``main`` alone. The law of `fuzzy` there is p(. | C)
    with C all kept children, grafted ones too: they only add to p(C), so the law comes closer to p and less is spent.
    Without the favourite, C could hold nothing but a grafted token that both models find unlikely, and a gate that
    opens because the models agree would force it; so q is dropped and the gate stays closed.

    A drafter that samples its chain (a small LM at temperature above 0) drafts alone there: a second child has no place
    in the exact test of a sampled draft.

    Args:
        main: the drafter whose distributions are used.
        side: what is grafted on; its distributions are not used.
        nodes: nodes verified per round, the root included; default as many as ``main`` has alone.

    Raises:
        FsdError: fewer than 2 nodes.
    """

    name = "graft"

    def __init__(self, main: Drafter, side: Drafter, nodes: int | None = None) -> None:
        self.main, self.side = main, side
        self.nodes = main.max_nodes if nodes is None else nodes
        if self.nodes < 2:
            raise FsdError(f"a grafted tree needs nodes >= 2, got {self.nodes}: give nodes.")
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
        return max(self.nodes, self.main.max_nodes)  # main's own tree where it samples

    @property
    def max_depth(self) -> int:
        return max(self.main.max_depth, self.side.max_depth)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> GraftedSession:
        return GraftedSession(self, first_tokens, request)

    def for_batch(self, batch: int, tilt: float = 0.0) -> Drafter:
        main = self.main.for_batch(batch, tilt)
        if main is self.main or isinstance(main, NoDrafter):  # where one tree does not pay, two do not either
            return self if main is self.main else main
        more = max(self.nodes - self.main.max_nodes, 0)  # room that the side has to itself
        return GraftedDrafter(main, self.side, min(max(self.nodes, main.max_nodes), main.max_nodes + more))

    def describe(self) -> dict[str, Any]:
        parts = {"main": self.main.describe(), "side": self.side.describe()}
        return {"name": self.name, "nodes": self.nodes, "depth": self.max_depth, **parts}


class GraftedSession(DraftSession):
    """A session of each."""

    def __init__(self, drafter: GraftedDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.tilt, self.auto = drafter, request.tilt, request.auto
        self.main, self.side = (part.start(first_tokens, request) for part in drafter.parts)

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.main.extend(tokens, features, counts)
        self.side.extend(tokens, features, counts)

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        for session in (self.main, self.side):
            session.observe(tree, logits, path, tokens, accepted)

    def copies(self, tree: DraftTree, n: int) -> Tensor | None:
        of_main, of_side = self.main.copies(tree, n), self.side.copies(tree, n)
        return of_side if of_main is None else of_main if of_side is None else of_main | of_side

    def finish(self, row: int, prompt: list[int], answer: list[int]) -> None:
        for session in (self.main, self.side):
            session.finish(row, prompt, answer)

    def draft(self, roots: Tensor) -> DraftTree:
        drafter, side = self.drafter, self.side.draft(roots)
        if self.auto is not None and not side.sampled:
            self.auto.cover(side)
        main = self.main.draft(roots)
        if main.sampled:
            _warn_sampled(drafter.main.name)
            return main
        if side.sampled:
            _warn_sampled(drafter.side.name)
            return main
        union = union_of(main, side, drafter.max_depth, len(drafter.main.proposers))
        if self.auto is not None:
            return kept_of(union, main, self.auto.keep(union))
        nodes = likeliest(union.scores, union.parents, drafter.max_depth, self.tilt, drafter.nodes)
        if nodes.device.type == "cpu":  # no row needs the rest; elsewhere a look would cost more than padding
            nodes = nodes[:, : 1 + int(union.is_draft.sum(1).max())]
        return kept_of(union, main, nodes)

    def select(self, rows: Tensor) -> None:
        self.main.select(rows)
        self.side.select(rows)


def union_of(main: DraftTree, side: DraftTree, depth: int, mains: int = 1) -> DraftTree:
    """All nodes of two trees of the same roots, neither of them sampled; see :class:`GraftedDrafter`.

    First come those of ``main``, then those of ``side``. What is in ``main`` too is padding there.

    Args:
        depth: no node lies deeper.
        mains: drafters that ``main`` comes from.
    """
    found = ops.tree_union(_parts(main), _parts(side), mains) or _union_in_torch(main, side, depth, mains)
    tokens, parents, scores, proposers = found
    more = parents.shape[1] - main.parents.shape[1]
    q_index = torch.nn.functional.pad(main.q_index, (0, more), value=-1)
    return replace(main, tokens=tokens, parents=parents, scores=scores, q_index=q_index, proposers=proposers)


def _parts(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return tree.tokens, tree.parents, tree.scores, tree.proposers


def _union_in_torch(main: DraftTree, side: DraftTree, depth: int, mains: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, scores and proposers of the union: the form of :func:`union_of` for every device."""
    place, shared = _places(main, side, depth)
    parents = torch.cat([main.parents, place.gather(1, side.parents)[:, 1:]], 1)
    of_side = _chances(side)
    one = torch.cat([_chances(main), of_side.masked_fill(shared, 0.0)[:, 1:]], 1)
    other = torch.zeros_like(one).scatter(1, place, of_side.masked_fill(~shared, 0.0))
    chance = one + other - one * other
    total = torch.zeros_like(chance).scatter_add(1, parents[:, 1:], chance[:, 1:]).clamp_min(1.0)
    steps = (chance / total.gather(1, parents)).clamp_max(1.0).log()
    steps[:, 0] = 0.0
    proposers = [torch.zeros_like(tree.parents) if tree.proposers is None else tree.proposers for tree in (main, side)]
    tokens = torch.cat([main.tokens, side.tokens[:, 1:]], 1)
    return tokens, parents, path_sums(steps, parents, depth), torch.cat([proposers[0], proposers[1][:, 1:] + mains], 1)


def kept_of(union: DraftTree, main: DraftTree, nodes: Tensor) -> DraftTree:
    """These nodes [B, K] of a union; without q where they lack the child that ``main`` likes best."""
    kept = torch.zeros_like(union.parents, dtype=torch.bool).scatter(1, nodes, True)
    first = main.first_choices
    has_first = kept.gather(1, first.clamp_min(0)) & (first >= 0)
    q_index = union.q_index.clone()
    q_index[:, : main.parents.shape[1]].masked_fill_(~has_first, -1)
    return replace(union, q_index=q_index).keep(nodes)


def _chances(tree: DraftTree) -> Tensor:
    """[B, N] of each node given its parent; 0 at padding."""
    return (tree.scores - tree.scores.gather(1, tree.parents)).clamp_max(0.0).exp()


def _places(main: DraftTree, side: DraftTree, depth: int) -> tuple[Tensor, Tensor]:
    """[B, M] where each node of ``side`` is in the union, and whether it is a node of ``main``: its path is there."""
    count, others = main.parents.shape[1], side.parents.shape[1]
    same = (main.tokens[:, :, None] == side.tokens[:, None]) & main.is_draft[:, :, None] & side.is_draft[:, None]
    same[:, 0, 0] = True
    # a pair of nodes is one node if their tokens are the same, and so are the parents'
    same, above = same.flatten(1), (main.parents[:, :, None] * others + side.parents[:, None]).flatten(1)
    for _ in range(depth.bit_length()):  # each time twice as much of the paths is compared
        same, above = same & same.gather(1, above), above.gather(1, above)
    shared, place = same.view(-1, count, others).int().max(1)
    own = torch.arange(count - 1, count - 1 + others, device=place.device)
    return torch.where(shared > 0, place, own), shared > 0
