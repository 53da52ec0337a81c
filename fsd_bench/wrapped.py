"""Another drafter's trees, observed: what measuring and recording have in common."""

from __future__ import annotations

from torch import Tensor

from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession
from fsd_infer.tree import DraftTree


class WrappedDrafter(Drafter):
    """Drafts as ``drafter`` does. A subclass opens a :class:`WrappedSession` of its own in ``start``."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.name, self.auto = drafter, drafter.name, drafter.auto

    @property
    def parts(self) -> tuple[Drafter]:
        return (self.drafter,)

    @property
    def proposers(self) -> tuple[str, ...]:
        return self.drafter.proposers

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        return WrappedSession(self.drafter.start(first_tokens, request))


class WrappedSession(DraftSession):
    """Passes every call on to ``session``."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.session.extend(tokens, features, counts)

    def draft(self, roots: Tensor) -> DraftTree:
        return self.session.draft(roots)

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        self.session.observe(tree, logits, path, tokens, accepted)

    def copies(self, tree: DraftTree, n: int) -> Tensor | None:
        return self.session.copies(tree, n)

    def finish(self, row: int, prompt: list[int], answer: list[int]) -> None:
        self.session.finish(row, prompt, answer)

    def select(self, rows: Tensor) -> None:
        self.session.select(rows)
