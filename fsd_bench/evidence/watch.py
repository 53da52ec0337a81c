"""A drafter that is watched: how many drafts each round accepted, and how far target and drafter are apart."""

from __future__ import annotations

from torch import Tensor

from fsd_infer.divergence import divergence
from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession
from fsd_infer.drafters.wrapped import WrappedDrafter, WrappedSession
from fsd_infer.tree import DraftTree


class Watched(WrappedDrafter):
    """Any drafter, for one prompt at a time.

    Attributes:
        rounds: tokens that each round of the last answer could emit (the prefill is the first).
        distances: js(p, q) of the raw distributions at every context that was emitted from and has a q, in nats; empty
            unless ``measure`` is set.
    """

    def __init__(self, drafter: Drafter, measure: bool = False) -> None:
        super().__init__(drafter)
        self.measure = measure
        self.rounds: list[int] = []
        self.distances: list[float] = []

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        self.rounds, self.distances = [], []
        return _Session(self, self.drafter.start(first_tokens, request))


class _Session(WrappedSession):
    def __init__(self, watched: Watched, session: DraftSession) -> None:
        super().__init__(session)
        self.watched = watched

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        count = int(accepted[0]) + 1
        self.watched.rounds.append(count)
        if self.watched.measure:
            nodes = path[0, :count].to(logits.device)
            index = tree.q_index[0, nodes]
            nodes, index = nodes[index >= 0], index[index >= 0]
            if len(nodes):
                found = divergence("js").with_reduced_drafter(logits[0, nodes], tree.q_logits[0, index], tree.draft_ids)
                self.watched.distances += found.tolist()
        super().observe(tree, logits, path, tokens, accepted)
