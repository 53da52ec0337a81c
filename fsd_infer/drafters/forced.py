"""Draft the tokens that a grammar forces: they cost the drafter nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.graft import keep_nodes, union_of
from fsd_infer.drafters.session import DraftRequest, DraftSession
from fsd_infer.trees.tree import DraftTree, Nodes, select_nodes

MAX_FORCED = 16  # forced tokens of a round
FORCED_ALONE = 2  # a row with this many forced tokens takes no drafts of the main drafter


class ForcedDrafter(Drafter):
    """A drafter whose tree holds the tokens that a guide forces after the text, as a chain with probability 1.

    A forced chain is a function of the text, and the rule verifies it like any other draft. So every distribution stays
    as it is. A row with a long chain drafts nothing else, whatever the rows beside it do; a shorter chain becomes part
    of the main tree. If the chains of all rows are long, the main drafter is not called.

    Args:
        main: drafts where nothing is forced.
        forced: returns the tokens that the grammar forces, from a row's number in the request and its answer.
        vocab_size: V of the target.
    """

    def __init__(self, main: Drafter, forced: Callable[[int, list[int]], list[int]], vocab_size: int) -> None:
        self.main, self.forced, self.vocab_size = main, forced, vocab_size
        self.name, self.target, self.directory = main.name, main.target, main.directory
        self.bounds, self.menu = main.bounds, main.menu

    @property
    def parts(self) -> Sequence[Drafter]:
        return (self.main,)

    @property
    def recording_key(self) -> Hashable:
        return type(self), self.main.recording_key

    @property
    def proposers(self) -> tuple[str, ...]:
        return (*self.main.proposers, "guide")

    @property
    def learner(self) -> Drafter:
        return self.main.learner

    @property
    def max_nodes(self) -> int:
        return self.main.max_nodes + MAX_FORCED

    @property
    def max_depth(self) -> int:
        return max(self.main.max_depth, MAX_FORCED)

    def for_bonus(self, draft_bonus: float) -> Drafter:
        main = self.main.for_bonus(draft_bonus)
        return self if main is self.main else ForcedDrafter(main, self.forced, self.vocab_size)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> ForcedSession:
        return ForcedSession(self, first_tokens, request)

    def describe(self) -> dict[str, Any]:
        return self.main.describe()


class ForcedSession(DraftSession):
    """The main drafter's session with each row's answer so far."""

    per_row = DraftSession.per_row | {"rows", "answers", "ends"}
    needs_report = True
    _host_inputs: Tensor | None = None  # the chains of recorded rounds

    def __init__(self, drafter: ForcedDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.device, self.shape = drafter, request.device, request.shape
        self.parts = [drafter.main.start(first_tokens, request)]
        self.rows = list(range(request.batch))
        self.answers: list[list[int]] = [[] for _ in self.rows]
        self.ends = first_tokens.tolist()  # the last token of each text
        self.finished: set[int] = set()  # of rows that stay in the batch
        self._chains: list[list[int]] = []
        self._main_is_idle = False  # whether the main drafter does not draft in this round

    @property
    def main(self) -> DraftSession:
        return self.parts[0]

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        super().extend_on_host(rows)
        for at, (answer, row) in enumerate(zip(self.answers, rows, strict=True)):
            if row:
                answer += row if answer else row[-1:]  # the first tokens are the prompt's, and the answer's first one
                self.ends[at] = row[-1]

    def on_end(self, row: int, prompt: list[int], answer: list[int]) -> None:
        super().on_end(row, prompt, answer)
        self.finished.add(self.rows[row])

    @property
    def is_recordable(self) -> bool:
        return (self.shape is None or self.shape.prices is None) and self.main.is_recordable

    @property
    def shape_key(self) -> Hashable:
        return self._main_is_idle, any(self._chains), self.shape, self.main.shape_key

    def host_inputs(self) -> list[Tensor]:
        return [DraftTree.packed_lists(self._forced_chains(), 1 + MAX_FORCED), *super().host_inputs()]

    def set_host_inputs(self, inputs: Iterator[Tensor] | None) -> None:
        self._host_inputs = None if inputs is None else next(inputs)
        super().set_host_inputs(inputs)

    def restart(self, fresh: ForcedSession) -> None:
        super().restart(fresh)
        vars(self).update({**vars(fresh), "parts": self.parts})

    def draft(self, roots: Tensor) -> DraftTree:
        self.growth, forced = None, self._forced_tree()
        if self._main_is_idle:
            return replace(forced, proposers=torch.full_like(forced.parents, self._proposer))
        if self.shape is not None:
            self.main.shape = self.shape
        main, self.growth = self.main.draft(roots), self.main.growth
        if main.sampled and main.drawn is None or not any(self._chains):
            return main
        return self._merge(main, forced)

    @property
    def _proposer(self) -> int:
        """The guide's index among the proposers."""
        return len(self.drafter.main.proposers)

    def _forced_tree(self) -> DraftTree:
        """Return the forced tokens as chains, each with probability 1."""
        vocab_size = self.drafter.vocab_size
        if self._host_inputs is None:
            return DraftTree.of_lists(self._forced_chains(), vocab_size, self.device, MAX_FORCED)
        return DraftTree.of_packed(self._host_inputs, vocab_size, MAX_FORCED)

    def _merge(self, main: DraftTree, forced: DraftTree) -> DraftTree:
        """Return the main trees with the forced chains; a long chain alone."""
        drafter, is_long = self.drafter, forced.is_draft.sum(1, keepdim=True) >= FORCED_ALONE
        drawn = None if main.drawn is None else main.drawn & ~is_long
        main = replace(main, scores=main.scores.masked_fill(main.is_draft & is_long, -math.inf), drawn=drawn)
        union = union_of(main, forced, drafter.max_depth, self._proposer)
        union.depth_bound = drafter.max_depth
        drafts = union.is_draft.sum(1)
        if functional.host_all(drafts == main.is_draft.sum(1)):  # main holds the chains
            return main
        most = 1 + functional.host_max(drafts, drafter.max_nodes - 1)
        nodes = select_nodes(union.scores, union.parents, drafter.max_depth, 0.0, most, union.pinned)
        if self.growth is not None:
            self.growth.is_choice = False
        return replace(keep_nodes(union, main, nodes), forecast=None)  # what is forced says nothing of the drafter

    def _forced_chains(self) -> list[Nodes]:
        """Ask the grammar what it forces; return chains of it."""
        # rows that fill a bucket have no answer
        rows = list(zip(self.rows, self.answers, strict=True))
        goes_on = [bool(answer) and row not in self.finished for row, answer in rows]
        forced = self.drafter.forced
        self._chains = [forced(*row)[:MAX_FORCED] if goes else [] for row, goes in zip(rows, goes_on)]
        shortest = min((len(chain) for chain in compress(self._chains, goes_on)), default=0)
        self._main_is_idle = shortest >= FORCED_ALONE
        return [_chain([root, *chain]) for root, chain in zip(self.ends, self._chains, strict=True)]


def _chain(tokens: list[int]) -> Nodes:
    """Return a chain of drafts with probability 1 under the first token."""
    return tokens, [max(node - 1, 0) for node in range(len(tokens))], [0.0] * len(tokens)
