"""The text of an answer that is being served: up to its first stop text, and no further than is certain."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsd_core.text.pieces import Pieces, special_names
from fsd_infer.serving.tools import overlap


class AnswerText:
    """Text from tokens, one by one.

    A stop text may hold names of special tokens, which are no part of the text. A name in the model's own words counts
    as well.

    Args:
        tokenizer: tokenizer of the target.
        stops: texts that end the answer and are no part of it.

    Attributes:
        text: what is certain: before the first stop text, and without an end that may become one.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self._pieces, self._ends = Pieces(tokenizer), list[float]()
        names = special_names(tokenizer) if stops else {}
        marks = _marks(names.values(), stops)
        marked = [other for stop in stops if (other := _with_marks(stop, marks)) != stop]
        by_id = {index: marks[name] for index, name in names.items() if name in marks}
        self._watches = [_Watch(stops, {}), _Watch(marked, by_id)]
        self._stopped = False

    def add(self, token: int) -> bool:
        """Append a token. Return whether a stop text ends with it."""
        piece = self._pieces.add(token)
        # inside a character, a token ends between what is certain and the character that it begins
        self._ends.append(len(self._pieces.text) + 0.5 * self._pieces.is_partial)
        seen = [watch.add(token, piece) for watch in self._watches]
        stopped_at = [held for held, is_stop in seen if is_stop]
        held = max(stopped_at or [held for held, _ in seen])
        self.text = self._pieces.text[: len(self._pieces.text) - held]
        self._stopped = bool(stopped_at)
        return self._stopped

    def end(self) -> str:
        """End the answer. Return the text that stands for an incomplete last character."""
        if self._stopped:
            return ""
        rest = self._pieces.rest()
        self.text = self._pieces.text + rest
        return rest

    def tokens_within(self, length: int) -> int:
        """Return how many tokens the first ``length`` characters hold, the last of them as a whole."""
        index = bisect_left(self._ends, length)
        return index + (index < len(self._ends) and self._ends[index] == length)


class _Watch:
    """Looks for stop texts at the end of a growing text. ``marks`` stand for special tokens in both, by id."""

    def __init__(self, stops: Sequence[str], marks: Mapping[int, str]) -> None:
        self.stops, self.marks = stops, marks
        self.longest = max(map(len, stops), default=0)
        self.seen = ""  # the end of the text

    def add(self, token: int, piece: str) -> tuple[int, bool]:
        """Take what a token adds. Return how many characters to hold back, and whether a stop text was found."""
        if not self.stops:
            return 0, False
        self.seen = self.seen[-self.longest :] + piece + self.marks.get(token, "")
        indices = [index for stop in self.stops if (index := self.seen.find(stop)) >= 0]
        longest = max(overlap(self.seen, stop) for stop in self.stops)
        held = self.seen[min(indices) :] if indices else self.seen[len(self.seen) - longest :]
        return len(held) - sum(map(held.count, set(self.marks.values()))), bool(indices)


def _marks(names: Iterable[str], stops: Sequence[str]) -> dict[str, str]:
    """Return a lone surrogate, which no text holds, for the name of each special token that stop texts hold."""
    called = sorted({name for name in names if name and any(name in stop for stop in stops)})
    return {name: chr(0xD800 + index) for index, name in enumerate(called)}


def _with_marks(stop: str, marks: Mapping[str, str]) -> str:
    """Return a stop text with marks in place of the names of special tokens, the longest name first."""
    if not marks:
        return stop
    return re.sub("|".join(map(re.escape, sorted(marks, key=len, reverse=True))), lambda match: marks[match[0]], stop)
