"""What needs no reference: how much an answer repeats itself, and what it says in the end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from decimal import Decimal

from fsd_infer.bench.score import first_option, last_number

NGRAM = 4


def repeated_ngrams(tokens: Sequence[Hashable], n: int = NGRAM) -> float | None:
    """Share of an answer's n-grams that occurred earlier in it; None if it is shorter than ``n`` tokens."""
    count = len(tokens) - n + 1
    if count < 1:
        return None
    return 1.0 - len({tuple(tokens[place : place + n]) for place in range(count)}) / count


def final_answer(text: str, options: Sequence[str] = ()) -> str | None:
    """What an answer says in the end: the option that it names first, or without options its last number.

    Equal numbers give equal texts (18.0 and 18). None where there is no option and no number.
    """
    if options:
        return first_option(text, options)
    number: Decimal | None = last_number(text)
    if number is None:
        return None
    plain = f"{number:f}"
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain) or "0"
