"""Measure an answer's text: score, copies, repetition, coverage, language, final answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsd_bench.base import Answer
from fsd_bench.score import Reference, asked_options, first_option, last_number
from fsd_bench.texts import other_language
from fsd_infer.chat.encoding import PromptRow
from fsd_infer.engine.ngrams import copied_ngrams, coverage, repeated_ngrams


def measure(answer: Answer, tokenizer: Any, prompt: Sequence[int], row: PromptRow, reference: Reference | None) -> None:
    """Measure an answer's text, and store it and the results in the answer. Skips answers without text and tokens.

    Args:
        answer: receives the results.
        tokenizer: the target's tokenizer.
        prompt: token ids.
        row: the prompt's row.
        reference: what the answer is scored against, or None.
    """
    text, tokens = answer.text, answer.tokens
    if tokens is not None:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
    elif text is not None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    if text is None or tokens is None:
        return
    answer.text = text
    answer.copied_4grams, answer.repeated_4grams = copied_ngrams(prompt, tokens), repeated_ngrams(tokens)
    answer.final = final_answer(text, (reference and reference.options) or asked_options(row))
    if reference is not None:
        answer.score = reference.score(text)
        if reference.kind == "rouge":
            answer.coverage = word_coverage(row.messages[-1]["content"], text)
        elif reference.kind == "chrf":
            answer.other_language = float(other_language(text, reference.value))  # type: ignore[arg-type]


def word_coverage(source: str, summary: str) -> float | None:
    """Return :func:`fsd_infer.engine.ngrams.coverage` of words in lower case."""
    words, others = (re.findall(r"\w+", text.lower()) for text in (source, summary))
    return coverage(words, others)


def final_answer(text: str, options: Sequence[str] = ()) -> str | None:
    """Return the final answer of a text: the option that it names first, or without options its last number.

    Equal numbers give equal texts (18.0 and 18). None without an option or a number.
    """
    if options:
        return first_option(text, options)
    number = last_number(text)
    if number is None:
        return None
    plain = f"{number:f}"
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain) or "0"
