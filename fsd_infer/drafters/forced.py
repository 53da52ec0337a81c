"""Draft the tokens that a grammar forces: they cost the drafter nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession
from fsd_infer.drafters.graft import kept_of, union_of
from fsd_infer.tree import DraftTree, Nodes
from fsd_infer.trees.visits import likeliest

MOST = 16  # forced tokens of a round
ALONE = 2  # with this many forced tokens in every row the main drafter does not draft


class ForcedDrafter(Drafter):
    """A drafter whose tree holds the tokens that a guide forces after the text, as a chain with probability 1.

    A forced chain is a function of the text, and the rule verifies it like any other draft. So every law stays as it
    is. A round with a long chain does not call the main drafter; a shorter chain becomes part of the main tree.

    Args:
        main: drafts where nothing is forced.
        forced: returns the tokens that the grammar forces, from a row's number in the request and its answer.
        vocab_size: V of the target.
    """

    def __init__(self, main: Drafter, forced: Callable[[int, list[int]], list[int]], vocab_size: int) -> None:
        self.main, self.forced, self.vocab_size = main, forced, vocab_size
        self.name, self.target, self.directory, self.bounds = main.name, main.target, main.directory, main.bounds

    @property
    def parts(self) -> Sequence[Drafter]:
        return (self.main,)

    @property
    def proposers(self) -> tuple[str, ...]:
        return (*self.main.proposers, "guide")

    @property
    def learner(self) -> Drafter:
        return self.main.learner

    @property
    def max_nodes(self) -> int:
        return self.main.max_nodes + MOST

    @property
    def max_depth(self) -> int:
        return max(self.main.max_depth, MOST)

    def for_law(self, tilt: float) -> Drafter:
        main = self.main.for_law(tilt)
        return self if main is self.main else ForcedDrafter(main, self.forced, self.vocab_size)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> ForcedSession:
        return ForcedSession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        return self.main.describe()


class ForcedSession(DraftSession):
    """The main drafter's session with each row's answer so far."""

    def __init__(self, drafter: ForcedDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.device, self.shape = drafter, request.device, request.shape
        self.main = drafter.main.start(first_tokens, request)
        self.parts = [self.main]
        self.rows = list(range(request.batch))
        self.answers: list[list[int]] = [[] for _ in self.rows]
        self.ends = first_tokens.tolist()  # the last token of each text

    on_host = True

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        super().append(rows)
        for at, (answer, row) in enumerate(zip(self.answers, rows, strict=True)):
            answer += row if answer else row[-1:]  # the first tokens are the prompt's, and the answer's first one
            self.ends[at] = row[-1]

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        kept = rows.tolist()
        self.rows, self.answers = [self.rows[row] for row in kept], [self.answers[row] for row in kept]
        self.ends = [self.ends[row] for row in kept]

    def draft(self, roots: Tensor) -> DraftTree:
        drafter, self.growth = self.drafter, None
        chains = [drafter.forced(row, answer)[:MOST] for row, answer in zip(self.rows, self.answers)]
        nodes = [_chain([root, *chain]) for root, chain in zip(self.ends, chains, strict=True)]
        forced = DraftTree.of_lists(nodes, drafter.vocab_size, self.device, MOST)
        own = len(drafter.main.proposers)  # the guide's place among the proposers
        if min(map(len, chains)) >= ALONE:
            return replace(forced, proposers=torch.full_like(forced.parents, own))
        if self.shape is not None:
            self.main.shape = self.shape
        main, self.growth = self.main.draft(roots), self.main.growth
        if main.sampled and main.drawn is None or not any(chains):
            return main
        union = union_of(main, forced, drafter.max_depth, own)
        union.levels = drafter.max_depth
        drafts = union.is_draft.sum(1)
        if bool((drafts == main.is_draft.sum(1)).all()):  # the main tree holds the chains
            return main
        most = min(1 + int(drafts.max()), drafter.max_nodes)
        kept = likeliest(union.scores, union.parents, drafter.max_depth, 0.0, most, union.held)
        if self.growth is not None:
            self.growth.is_choice = False
        return kept_of(union, main, kept)


def _chain(tokens: list[int]) -> Nodes:
    """Return a chain of drafts with probability 1 under the first token."""
    return tokens, [max(place - 1, 0) for place in range(len(tokens))], [0.0] * len(tokens)
