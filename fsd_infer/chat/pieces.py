"""Split decoded text by token, and find where two texts overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds. Joined, the pieces are the decoded text without special tokens.

    A token that ends inside a character adds nothing. The token that completes the character adds it.
    """
    pieces: list[str] = []
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        whole = end == len(tokens) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return pieces


def overlap(text: str, other: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of ``other``."""
    return next((size for size in range(min(len(other), len(text)), 0, -1) if text.endswith(other[:size])), 0)
