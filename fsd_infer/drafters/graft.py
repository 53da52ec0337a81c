"""The union of two drafters' trees under one budget of nodes."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

from torch import Tensor

from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession, NoDrafter
from fsd_infer.drafters.online import RoundChoice
from fsd_infer.drafters.visits import likeliest
from fsd_infer.errors import FsdError
from fsd_infer.tree import DraftTree, TreeRow


@cache
def _warn_sampled(name: str) -> None:
    warnings.warn(
        f"{name} samples its drafts at temperature above 0, and a sampled chain takes no graft: it drafts alone.",
        stacklevel=2,
    )


@DRAFTERS.register("graft")
class GraftedDrafter(Drafter):
    """Two drafters' trees merged, the best nodes of both kept. By name: "X+lookup", X any drafter's name.

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
        # rows with fewer candidates than others are padded, in the worst case below a chain
        return max(self.main.max_depth + (self.nodes > self.main.max_nodes), self.side.max_depth)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> GraftedSession:
        main, side = (part.start(first_tokens, request) for part in (self.main, self.side))
        return GraftedSession(self, main, side, request.tilt, request.choice)

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

    def __init__(
        self,
        drafter: GraftedDrafter,
        main: DraftSession,
        side: DraftSession,
        tilt: float = 0.0,
        choice: RoundChoice | None = None,
    ) -> None:
        self.drafter, self.main, self.side, self.tilt, self.choice = drafter, main, side, tilt, choice

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.main.extend(tokens, features, counts)
        self.side.extend(tokens, features, counts)

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        for session in (self.main, self.side):
            session.observe(tree, logits, path, tokens, accepted)

    def draft(self, roots: Tensor) -> DraftTree:
        main = self.main.draft(roots)
        if main.sampled:
            _warn_sampled(self.drafter.main.name)
            return main
        side = self.side.draft(roots)
        if side.sampled:
            _warn_sampled(self.drafter.side.name)
            return main
        return merge_trees(main, side, self.drafter.nodes, self.tilt, len(self.drafter.main.proposers), self.choice)

    def select(self, rows: Tensor) -> None:
        self.main.select(rows)
        self.side.select(rows)


def merge_trees(
    main: DraftTree,
    side: DraftTree,
    nodes: int,
    tilt: float = 0.0,
    mains: int = 1,
    choice: RoundChoice | None = None,
) -> DraftTree:
    """The best ``nodes`` nodes of both trees, per row; see :class:`GraftedDrafter`. Neither tree may be sampled.

    mains: drafters that ``main`` comes from, see :meth:`TreeRow.proposer`.
    choice: chooses how many nodes, in place of ``nodes``.
    """
    mains_rows = main.to_rows()
    unions = [_union(*row, mains) for row in zip(mains_rows, side.to_rows(), strict=True)]
    candidates = [(union.scores, union.parents) for union in unions]
    kept = likeliest(candidates, tilt, nodes) if choice is None else choice.keep(candidates)
    rows = [_trimmed(union, row, best) for union, row, best in zip(unions, mains_rows, kept)]
    return DraftTree.from_rows(rows, main.q_logits, main.draft_ids)


def _steps(row: TreeRow) -> list[float]:
    """Chance of each node given its parent; 0 at padding."""
    chances = [1.0]
    for score, parent in zip(row.scores[1:], row.parents[1:]):
        chances.append(0.0 if score == -math.inf else math.exp(min(0.0, score - row.scores[parent])))
    return chances


def _union(main: TreeRow, side: TreeRow, mains: int) -> TreeRow:
    """All nodes of both, those of ``main`` first and with its ``q_index``."""
    tokens, parents = list(main.tokens), list(main.parents)
    chances = _steps(main)
    proposers = [main.proposer(node) for node in range(len(tokens))]
    number = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens)) if node}
    place = [0]  # where each side node is in the union, -1 for padding
    for node, chance in enumerate(_steps(side)):
        if node == 0:
            continue
        parent = place[side.parents[node]]
        if chance == 0.0 or parent < 0:
            place.append(-1)
            continue
        key = (parent, side.tokens[node])
        if key in number:
            same = number[key]
            chances[same] = 1.0 - (1.0 - chances[same]) * (1.0 - chance)
        else:
            same = number[key] = len(tokens)
            tokens.append(key[1])
            parents.append(parent)
            chances.append(chance)
            proposers.append(mains + side.proposer(node))
        place.append(same)

    total = [0.0] * len(tokens)
    for parent, chance in zip(parents[1:], chances[1:]):
        total[parent] += chance
    scores = [0.0]
    for parent, chance in zip(parents[1:], chances[1:]):
        scores.append(scores[parent] + math.log(chance / max(1.0, total[parent])) if chance > 0.0 else -math.inf)

    q_index = main.q_index + [-1] * (len(tokens) - len(main.tokens))
    return TreeRow(tokens, parents, scores, q_index, proposers)


def _trimmed(union: TreeRow, main: TreeRow, best: list[int]) -> TreeRow:
    """The root and these nodes of the union."""
    assert union.proposers is not None
    kept = [0, *best]
    renumbered = {node: place for place, node in enumerate(kept)}
    worst_first = sorted(range(len(main.tokens) - 1, 0, -1), key=main.scores.__getitem__)
    favourites = {main.parents[node]: node for node in worst_first}  # of equals the first
    q_index = [union.q_index[node] if favourites.get(node) in renumbered else -1 for node in kept]
    return TreeRow(
        [union.tokens[node] for node in kept],
        [renumbered[union.parents[node]] for node in kept],
        [union.scores[node] for node in kept],
        q_index,
        [union.proposers[node] for node in kept],
    ).best_first()
