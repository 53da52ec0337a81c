"""A drafter that notes how many tokens each round could emit."""

from __future__ import annotations

from torch import Tensor

from fsd_bench.wrapped import WrappedDrafter, WrappedSession
from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession
from fsd_infer.tree import DraftTree


class RoundSizes(WrappedDrafter):
    """Any drafter, for one prompt at a time.

    Attributes:
        rounds: tokens that each round of the last answer could emit (the prefill is the first).
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.rounds: list[int] = []

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        self.rounds = []
        return _Session(self.drafter.start(first_tokens, request), self.rounds)


class _Session(WrappedSession):
    def __init__(self, session: DraftSession, rounds: list[int]) -> None:
        super().__init__(session)
        self.rounds = rounds

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        self.rounds.append(int(accepted[0]) + 1)
        super().observe(tree, logits, path, tokens, accepted)
