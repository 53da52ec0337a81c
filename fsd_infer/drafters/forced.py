"""Draft the tokens that a grammar forces: they cost the drafter nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.free import FreeDrafter, FreeSession, Options, Table
from fsd_infer.drafters.graft import GraftedDrafter, GraftedSession, union_of
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.trees.tree import DraftTree

MAX_FORCED = 16  # forced tokens of a round
FORCED_ALONE = 2  # a row with this many forced tokens takes no drafts of the main drafter

Forced = Callable[[int, list[int]], list[int]]  # the tokens that the grammar forces, from a row's number and its answer


class ForcedDrafter(GraftedDrafter):
    """A drafter with a :class:`GuideDrafter` grafted onto it.

    A forced chain is a function of the text, and the rule verifies it like any other draft. So every distribution stays
    as it is. A row with a long chain drafts nothing else, whatever the other rows do; a shorter chain becomes part
    of the main tree. If the chains of all rows are long, the main drafter is not called.

    Args:
        main: drafts where nothing is forced.
        forced: returns the tokens that the grammar forces, from a row's number in the request and its answer.
        vocab_size: V of the target.
    """

    def __init__(self, main: Drafter, forced: Forced, vocab_size: int) -> None:
        super().__init__(main, GuideDrafter(forced, vocab_size), main.max_nodes + MAX_FORCED)
        self.forced, self.vocab_size = forced, vocab_size
        self.name, self.directory, self.bounds, self.menu = main.name, main.directory, main.bounds, main.menu

    @property
    def recording_key(self) -> Hashable:
        return type(self), self.main.recording_key

    @property
    def learner(self) -> Drafter:
        return self.main.learner

    def for_bonus(self, draft_bonus: float) -> Drafter:
        main = self.main.for_bonus(draft_bonus)
        return self if main is self.main else ForcedDrafter(main, self.forced, self.vocab_size)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> ForcedSession:
        return ForcedSession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        return self.main.describe()


class GuideDrafter(FreeDrafter):
    """A drafter of the tokens that a guide forces after the text, as a chain with probability 1.

    Args:
        forced: see :class:`ForcedDrafter`.
        vocab_size: V of the target.
    """

    name = "guide"
    context_length = 1
    drafts_beams = False

    def __init__(self, forced: Forced, vocab_size: int) -> None:
        super().__init__(vocab_size, MAX_FORCED, 1 + MAX_FORCED, min_accept_prob=0.5)
        self.forced = forced

    def start(self, first_tokens: Tensor, request: DraftRequest) -> GuideSession:
        return GuideSession(self, first_tokens, request)


class ForcedTokens(list[int]):
    """What is forced after a text, as a table. Its states are indices."""

    def at(self, context: Sequence[int]) -> int:
        return 0

    def step(self, state: int, token: int) -> int:
        return state + 1

    def options(self, state: int) -> Options:
        return [(token, 1.0) for token in self[state : state + 1]]


class GuideSession(FreeSession):
    """A session with each row's answer so far.

    Attributes:
        chains: the forced tokens of each row.
        suffices: whether the chains are long in all rows that go on.
    """

    drafter: GuideDrafter
    per_row = FreeSession.per_row | {"rows", "answers"}

    def __init__(self, drafter: GuideDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        super().__init__(drafter, first_tokens, request)
        self.rows = list(range(request.batch))
        self.answers: list[list[int]] = [[] for _ in self.rows]
        self.chains: list[ForcedTokens] = []
        self.suffices = False

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        super().extend_on_host(rows)
        for answer, row in zip(self.answers, rows, strict=True):
            answer += row if answer else row[-1:]  # the first tokens are the prompt's, and the answer's first one

    def on_end(self, row: int, prompt: list[int], answer: list[int]) -> None:
        self.answers[row] = []

    def states(self) -> list[tuple[Table, Any]]:
        # rows that fill a bucket, or have ended, have no answer
        rows, forced = list(zip(self.rows, self.answers, strict=True)), self.drafter.forced
        goes_on = [bool(answer) for _, answer in rows]
        self.chains = [ForcedTokens(forced(*row)[:MAX_FORCED] if goes else ()) for row, goes in zip(rows, goes_on)]
        self.suffices = min(map(len, compress(self.chains, goes_on)), default=0) >= FORCED_ALONE
        return [(chain, 0) for chain in self.chains]


class ForcedSession(GraftedSession):
    """The sessions of the main drafter and of the guide."""

    drafter: ForcedDrafter
    grafted: GuideSession

    @property
    def shape_key(self) -> Hashable:
        return self.grafted.suffices, any(self.grafted.chains), super().shape_key

    def draft(self, roots: Tensor) -> DraftTree:
        self.growth, forced = None, self.grafted.draft(roots)
        if self.grafted.suffices:
            return replace(forced, proposers=torch.full_like(forced.parents, self._proposer))
        if self.shape is not None:
            self.main.shape = self.shape
        main, self.growth = self.main.draft(roots), self.main.growth
        if main.sampled and main.drawn is None or not any(self.grafted.chains):
            return main
        return self._merge(main, forced)

    @property
    def _proposer(self) -> int:
        """The guide's index among the proposers."""
        return len(self.drafter.main.proposers)

    def _merge(self, main: DraftTree, forced: DraftTree) -> DraftTree:
        """Return the main trees with the forced chains; where a chain is long, only the chain."""
        drafter, is_long = self.drafter, forced.is_draft.sum(1, keepdim=True) >= FORCED_ALONE
        drawn = None if main.drawn is None else main.drawn & ~is_long
        main = replace(main, scores=main.scores.masked_fill(main.is_draft & is_long, -math.inf), drawn=drawn)
        union = union_of(main, forced, drafter.max_depth, self._proposer)
        if functional.host_all(union.is_draft.sum(1) == main.is_draft.sum(1)):  # main holds the chains
            return main
        if self.growth is not None:
            self.growth.is_choice = False
        best = self._best(union, main, 0.0, drafter.max_nodes)
        return replace(best, forecast=None)  # what is forced says nothing of the drafter
