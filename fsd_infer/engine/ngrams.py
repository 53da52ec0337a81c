"""The shares of an answer's n-grams that copy its prompt or repeat the answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile

NGRAM = 4


def repeated_ngrams(tokens: Sequence[Hashable], n: int = NGRAM) -> float | None:
    """Return the share of an answer's n-grams that occurred earlier in it; None for fewer than ``n`` tokens."""
    grams = _ngrams(tokens, n)
    return 1.0 - len(set(grams)) / len(grams) if grams else None


def copied_ngrams(prompt: Sequence[Hashable], tokens: Sequence[Hashable], n: int = NGRAM) -> float | None:
    """Return the share of an answer's n-grams that occur in its prompt; None for fewer than ``n`` tokens."""
    grams, known = _ngrams(tokens, n), set(_ngrams(prompt, n))
    return sum(gram in known for gram in grams) / len(grams) if grams else None


def kinds(prompt: Sequence[Hashable], tokens: Sequence[Hashable], n: int = NGRAM) -> list[str]:
    """Classify each token of an answer by the n-gram that it completes.

    "copied": it occurs in the prompt; else "repeated": it occurred earlier in the answer; else "new".
    """
    copied, seen = set(_ngrams(prompt, n)), set()
    labels = ["new"] * min(len(tokens), n - 1)
    for gram in _ngrams(tokens, n):
        labels.append("copied" if gram in copied else "repeated" if gram in seen else "new")
        seen.add(gram)
    return labels


def coverage(source: Sequence[Hashable], summary: Sequence[Hashable]) -> float | None:
    """Return extractive coverage (Grusky et al., 2018, arXiv:1804.11283); None if the summary is empty.

    It is the share of a summary's words in fragments of the source, matched greedily, longest first, left to right.
    """
    starts: dict[Hashable, list[int]] = {}
    for place, word in enumerate(source):
        starts.setdefault(word, []).append(place)
    place = covered = 0
    while place < len(summary):
        longest = 0
        for start in starts.get(summary[place], ()):
            ends = zip(summary[place:], source[start:])
            longest = max(longest, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends)))
        covered += longest
        place += max(longest, 1)
    return covered / len(summary) if summary else None


def _ngrams(tokens: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[place : place + n]) for place in range(len(tokens) - n + 1)]
