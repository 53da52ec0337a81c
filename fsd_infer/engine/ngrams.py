"""The shares of an answer's n-grams that copy its prompt or repeat the answer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import takewhile

NGRAM = 4


def repeated_ngrams(tokens: Sequence[Hashable]) -> float | None:
    """Return the share of an answer's n-grams that occurred earlier in it; None for fewer than :data:`NGRAM` tokens."""
    grams = _ngrams(tokens)
    return 1.0 - len(set(grams)) / len(grams) if grams else None


def copied_ngrams(prompt: Sequence[Hashable], tokens: Sequence[Hashable]) -> float | None:
    """Return the share of an answer's n-grams that occur in its prompt; None for fewer than :data:`NGRAM` tokens."""
    grams, known = _ngrams(tokens), set(_ngrams(prompt))
    return sum(gram in known for gram in grams) / len(grams) if grams else None


def kinds(prompt: Sequence[Hashable], tokens: Sequence[Hashable]) -> list[str]:
    """Classify each token of an answer by the n-gram that it completes.

    "copied": it occurs in the prompt; else "repeated": it occurred earlier in the answer; else "new".
    """
    copied, seen = set(_ngrams(prompt)), set()
    labels = ["new"] * min(len(tokens), NGRAM - 1)
    for gram in _ngrams(tokens):
        labels.append("copied" if gram in copied else "repeated" if gram in seen else "new")
        seen.add(gram)
    return labels


def coverage(source: Sequence[Hashable], summary: Sequence[Hashable]) -> float | None:
    """Return extractive coverage (Grusky et al., 2018, arXiv:1804.11283); None if the summary is empty.

    It is the share of a summary's words in fragments of the source, matched greedily, longest first, left to right.
    """
    starts: dict[Hashable, list[int]] = {}
    for index, word in enumerate(source):
        starts.setdefault(word, []).append(index)
    index = covered = 0
    while index < len(summary):
        longest = 0
        for start in starts.get(summary[index], ()):
            ends = zip(summary[index:], source[start:])
            longest = max(longest, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], ends)))
        covered += longest
        index += max(longest, 1)
    return covered / len(summary) if summary else None


def _ngrams(tokens: Sequence[Hashable]) -> list[tuple[Hashable, ...]]:
    return [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
