"""Sessions whose rounds are timed and counted, for a choice of trees to learn from."""

from __future__ import annotations

from torch import Tensor

from fsd_infer.drafters.base import DraftSession
from fsd_infer.drafters.online import RoundChoice
from fsd_infer.drafters.wrapped import WrappedSession
from fsd_infer.tree import DraftTree


class LearningSession(WrappedSession):
    """A session whose rounds are timed: what its :class:`RoundChoice` learns from.

    A round is drafted in ``draft``, verified from there to ``observe``, and ends with ``extend``.
    """

    def __init__(self, session: DraftSession, choice: RoundChoice) -> None:
        super().__init__(session)
        self.choice, self._clock = choice, choice.choice.clock
        self._last: tuple[DraftTree, list[list[int]], list[int]] | None = None
        self._marks = [0.0] * 3
        self._drafted = False  # what is observed first is the prompt's end

    def draft(self, roots: Tensor) -> DraftTree:
        start = self._now()
        tree = super().draft(roots)
        self._marks, self._drafted = [start, self._now(), 0.0], True
        return tree

    def observe(self, tree: DraftTree, logits: Tensor, path: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        if self._drafted:
            self._marks[2] = self._now()
            self._last = tree, path.tolist(), accepted.tolist()
        super().observe(tree, logits, path, tokens, accepted)

    def select(self, rows: Tensor) -> None:
        self._end(None)
        super().select(rows)
        self.choice.select(len(rows))

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        super().extend(tokens, features, counts)
        self._end(self._now())

    def _now(self) -> float:
        return self._clock() if self.choice.learns else 0.0

    def _end(self, now: float | None) -> None:
        if self._last is not None:
            start, drafted, verified = self._marks
            rest = None if now is None else now - verified
            self.choice.learn(*self._last, drafted - start, verified - drafted, rest)
        self._last = None
