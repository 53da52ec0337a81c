"""Remembered texts as one sorted array: a store that grows and forgets, and a corpus that is mapped from a file.

The prefixes of all texts are sorted by their last token, then by the one before it, and so on. So the prefixes that
end like a given text are adjacent, and the longest matches are nearest to the text's own position in the order. One
binary search finds them. An entry takes eight bytes: a token and an index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_MATCH = 32  # tokens by which prefixes are sorted, hence the longest match
MIN_MATCH = 2
END = -1  # separates texts
ENTRY_BYTES, TEXT_ENTRIES = 8, 32  # bytes of a token and its index; entries that a text costs in addition
STORE_BYTES = 2048  # of a store without texts

Ids = NDArray[np.int32]


class TextIndex:
    """Texts in which a context may occur.

    Attributes:
        bit: flag of these texts among the sources of a candidate.
        trust: weight of an occurrence in them.
    """

    bit, trust = 1, 1.0

    def mark_used(self, tokens: Sequence[int], index: int) -> None:
        """Note that the token at this index was accepted."""


# length of the match, its source, the text that has it, and the index in that text of the token after the match
Occurrence = tuple[int, TextIndex, Sequence[int], int]


def match_size(tokens: Sequence[int], index: int, context: Sequence[int]) -> int:
    """Return how many tokens before an index equal the end of ``context``, at most :data:`MAX_MATCH`."""
    size, longest = 0, min(index, len(context), MAX_MATCH)
    while size < longest and tokens[index - 1 - size] == context[-1 - size]:
        size += 1
    return size


def sorted_prefixes(tokens: Ids) -> Ids:
    """Return the indices of the tokens, sorted by the prefixes that end there. The method is prefix doubling."""
    count = len(tokens)
    _, rank = np.unique(tokens, return_inverse=True)
    rank, compared = rank.astype(np.int64), 1  # tokens by which they are sorted so far
    order = np.argsort(rank, kind="stable")
    while compared < MAX_MATCH:
        before = np.concatenate([np.full(min(compared, count), -1), rank[: max(count - compared, 0)]])
        key = rank * (count + 1) + before + 1
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])[:count]
        compared *= 2
    return order.astype(np.int32)


class SuffixStore(TextIndex):
    """An array of texts with its sorted prefixes.

    Args:
        tokens: the texts, each followed by :data:`END`.
        order: from :func:`sorted_prefixes`.
    """

    bit, trust = 4, 0.25

    def __init__(self, tokens: Ids, order: Ids) -> None:
        self._set(tokens, order)

    def _set(self, tokens: Ids, order: Ids) -> None:
        self.array, self.order = tokens, order
        views: Any = memoryview  # single numbers are read faster than from an array
        self.tokens, self._order = views(tokens), views(order)

    def __len__(self) -> int:
        return len(self.array)

    def matches(self, context: Sequence[int], limit: int) -> list[Occurrence]:
        """Return up to ``limit`` occurrences of the end of ``context``, the longest matches first."""

        def longest_first(ranks: range) -> Iterator[Occurrence]:
            for rank in ranks:
                size = match_size(tokens, order[rank] + 1, context)
                if size < MIN_MATCH:
                    return
                yield size, self, tokens, order[rank] + 1

        tokens, order = self.tokens, self._order
        start = bisect_left(order, list(context[-1 : -MAX_MATCH - 1 : -1]), key=self._reversed_prefix)
        before, after = longest_first(range(start - 1, -1, -1)), longest_first(range(start, len(order)))
        return list(islice(heapq.merge(before, after, key=lambda match: -match[0]), limit))

    def _reversed_prefix(self, index: int) -> list[int]:
        """Return the prefix that ends at an index, backwards."""
        return self.tokens[max(index - MAX_MATCH + 1, 0) : index + 1].tolist()[::-1]


class Store(SuffixStore):
    """Texts of earlier requests, within a bound in bytes. The least recently used texts are evicted first.

    Args:
        max_bytes: most bytes of its arrays, and of :data:`TEXT_ENTRIES` entries for each text.

    Attributes:
        hit_rates: estimated acceptance of candidates, learned while decoding.
    """

    bit = 2

    def __init__(self, max_bytes: int) -> None:
        self.max_entries = max_bytes // ENTRY_BYTES
        self.clock = 0
        self.hit_rates: dict[Any, Any] = {}
        self.texts: list[_Text] = []  # in the order of their tokens
        self.by_hash: dict[int, _Text] = {}
        super().__init__(np.zeros(0, np.int32), np.zeros(0, np.int32))

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES * self._entries

    @property
    def _entries(self) -> int:
        return len(self) + TEXT_ENTRIES * len(self.texts)

    def add(self, texts: Iterable[Sequence[int]]) -> None:
        """Remember texts. One that is already stored is marked as used."""
        self.clock += 1
        new: list[int] = []
        for tokens in texts:
            text = self.by_hash.setdefault(hash(tuple(tokens)), _Text(-1, 0))
            text.used = self.clock
            if text.start < 0:
                text.start = len(self) + len(new)
                new += [*tokens[-self.max_entries // 4 :], END]
                self.texts.append(text)
        if not new:
            return
        array = np.array(new, np.int32)
        order = sorted_prefixes(array)
        alone = SuffixStore(array, order)
        ranks = [
            bisect_left(self._order, alone._reversed_prefix(index), key=self._reversed_prefix)
            for index in order.tolist()
        ]
        self._set(np.concatenate([self.array, array]), np.insert(self.order, ranks, order + np.int32(len(self))))
        if self._entries > self.max_entries:
            self.shrink(self.max_entries * ENTRY_BYTES)

    def mark_used(self, tokens: Sequence[int], index: int) -> None:
        if tokens is self.tokens:  # no text was added since
            self.texts[bisect_right(self.texts, index, key=lambda text: text.start) - 1].used = self.clock

    def shrink(self, max_bytes: int) -> None:
        """Evict the least recently used texts until the others fit nine tenths of ``max_bytes``."""
        max_entries = max_bytes // ENTRY_BYTES
        ends = [*(text.start for text in self.texts[1:]), len(self)]
        keep, entries = np.ones(len(self), bool), self._entries
        for text, end in sorted(zip(self.texts, ends), key=lambda one: one[0].used):
            if entries <= 0.9 * max_entries:
                break
            keep[text.start : end] = False
            entries -= end - text.start + TEXT_ENTRIES
        moved = np.cumsum(keep, dtype=np.int32) - 1
        self.texts = [text for text in self.texts if keep[text.start]]
        self.by_hash = {key: text for key, text in self.by_hash.items() if keep[text.start]}
        for text in self.texts:
            text.start = int(moved[text.start])
        self._set(self.array[keep], moved[self.order[keep[self.order]]])


@dataclass
class _Text:
    """The index at which a text of a store begins, and the time of its last use."""

    start: int
    used: int
