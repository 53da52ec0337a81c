"""The text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; together they are the decoded text without special tokens.

    A token that ends inside a character adds nothing, the one that completes it adds the character.
    """
    pieces: list[str] = []
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
        whole = end == len(tokens) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return pieces
