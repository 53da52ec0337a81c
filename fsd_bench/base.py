"""Define a method of decoding, and what one timed call returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from fsd_infer.rules import TokenOrigin

# fields of an answer that follow from its text
OF_TEXT = ("score", "copied_4grams", "coverage", "other_language", "repeated_4grams")


@dataclass
class AnswerTimeline:
    """How this package's engine made an answer, for reports of sweeps.

    Attributes:
        rounds: tokens that each round gave to the answer, the prefill first.
        sources: a digit per token, its :class:`TokenOrigin`.
        spent: [place, nats] of the tokens that cost any.
        pieces: the text of each token, or None if the report does not show the answer.
    """

    rounds: list[int]
    sources: str
    spent: list[list[float]]
    pieces: list[str] | None = None

    def __post_init__(self) -> None:
        for digit in set(self.sources):
            TokenOrigin(int(digit))  # ValueError


@dataclass
class MeasuredAnswer:
    """One answer and what it took. A field that a method does not report is None.

    Attributes:
        tokens: new tokens; None from a server that sends only text.
        target_forwards: target forwards after the prefill.
        verified_tokens: tokens that these forwards emitted, without the prefill's own.
        gate_open_fraction, gate_accepted_fraction: shares of the tokens, see ``RowStats``.
        divergence_spent: nats.
        finish_reason: "stop" or "length".
        log_likelihood: mean raw log-probability of the tokens under the target, nats.
        counted: number of new tokens, if ``tokens`` is None.
        text: the answer's text, if ``tokens`` is None or the text was measured.
        score: 1 for a right answer and 0 for a wrong one, or chrF or ROUGE-L; None without a reference.
        copied_4grams: share of its 4-grams that stand in its prompt; None if it is shorter.
        repeated_4grams: share of its 4-grams that occurred earlier in it; None if it is shorter.
        coverage: share of its words in fragments of its prompt, see :func:`fsd_infer.engine.ngrams.coverage`. Only for
            answers scored by ROUGE, which copies raise.
        other_language: 1 if its language differs from its reference's, else 0. Only for answers scored by chrF.
        regrets: gaps of the drafter's first choices, see :meth:`.FirstChoiceStats.gaps`; records call them so.
        final: its final answer, see :func:`fsd_bench.score.final_answer`.
        trace: how it was made, in sweeps.
        accepted: number of rounds that accepted at least 1, 2, … drafts. A round that the answer's end cuts short
            counts with the tokens that are left. None for beams, and for other programs.
    """

    tokens: list[int] | None
    target_forwards: int | None
    verified_tokens: int | None
    gate_open_fraction: float = 0.0
    gate_accepted_fraction: float = 0.0
    divergence_spent: float = 0.0
    finish_reason: str = "length"
    log_likelihood: float | None = None
    counted: int = 0
    text: str | None = None
    score: float | None = None
    copied_4grams: float | None = None
    repeated_4grams: float | None = None
    coverage: float | None = None
    other_language: float | None = None
    regrets: dict[str, list[list[float]]] = field(default_factory=dict)
    final: str | None = None
    trace: AnswerTimeline | None = None
    accepted: list[int] | None = None

    @property
    def length(self) -> int:
        """Number of new tokens."""
        return self.counted if self.tokens is None else len(self.tokens)


@dataclass
class TimedRun:
    """One timed call on a group of prompts: wall seconds, those until the first token, seconds by phase."""

    seconds: float
    prefill_seconds: float
    answers: list[MeasuredAnswer]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The runs of every method on one group of prompts in one repeat. ``prompts`` are indices."""

    group: int
    repeat: int
    prompts: list[int]
    runs: dict[str, TimedRun]

    def answers(self) -> Iterator[tuple[int, MeasuredAnswer]]:
        """Yield each answer with its prompt's index."""
        for run in self.runs.values():
            yield from zip(self.prompts, run.answers, strict=True)


class Method(ABC):
    """A way to decode.

    Attributes:
        name: what tables and records call it.
    """

    name: str

    @abstractmethod
    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        """Decode one group of prompts and time it. ``options`` are arguments of transformers' ``generate``."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a record stores about the method."""

    def close(self) -> None:  # noqa: B027 (most methods hold nothing)
        """Free what the method holds outside this process's memory."""


def typed(value: Any, hint: Any) -> Any:
    """Convert a JSON value to an annotated type: numbers, texts, and lists, dicts, unions and dataclasses of them.

    Raises:
        TypeError, KeyError, ValueError: the value has another type.
    """
    kind, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = _hints(hint)
        return hint(**{name: typed(item, hints[name]) for name, item in dict(value).items()})
    if kind is list and isinstance(value, list):
        return [typed(item, inner[0]) for item in value]
    if kind is dict and isinstance(value, dict):
        return {name: typed(item, inner[1]) for name, item in value.items()}
    if kind not in (list, dict):
        for each in inner:  # of a union
            with suppress(TypeError, KeyError, ValueError):
                return typed(value, each)
    if hint is Any or type(value) is hint:
        return value
    if hint is float and (type(value) is int or value in ("inf", "-inf")):  # JSON lacks infinities
        return float(value)
    raise TypeError(f"{value!r:.60} is not of the type {hint}")


_hints = cache(get_type_hints)
