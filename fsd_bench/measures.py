"""What needs no reference: what an answer says in the end, and how much of a summary is its source's own words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from fsd_bench.score import first_option, last_number
from fsd_infer.engine.ngrams import coverage


def word_coverage(source: str, summary: str) -> float | None:
    """:func:`fsd_infer.engine.ngrams.coverage` of words, in lower case."""
    words, others = (re.findall(r"\w+", text.lower()) for text in (source, summary))
    return coverage(words, others)


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
