"""What a method of decoding is to the benchmark, and what one timed call returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from fsd_infer.rules import Source

# fields of an answer that are measured of its text
OF_TEXT = ("score", "copied_4grams", "coverage", "other_language", "repeated_4grams")


@dataclass
class Trace:
    """How an answer of this package's engine came about, for reports of sweeps.

    Attributes:
        rounds: tokens that each round gave to the answer, the prefill first.
        sources: a digit per token, its :class:`Source`.
        spent: [place, nats] of tokens that cost some.
        pieces: the text of each token, where it is shown.
    """

    rounds: list[int]
    sources: str
    spent: list[list[float]]
    pieces: list[str] | None = None

    def __post_init__(self) -> None:
        for digit in set(self.sources):
            Source(int(digit))  # ValueError


@dataclass
class Answer:
    """One answer and what it took. None where a method does not report it.

    Attributes:
        tokens: new tokens; None from a server that sends text alone.
        target_forwards: target forwards after the prefill.
        verified_tokens: tokens that those forwards emitted (all but the prefill's own).
        gate_open_fraction, gate_accepted_fraction: shares of the tokens, see ``RowStats``.
        divergence_spent: nats.
        finish_reason: "stop" or "length".
        log_likelihood: mean raw log-probability of the tokens under the target, nats, if measured.
        counted: number of new tokens where ``tokens`` is None.
        text: of the answer, where ``tokens`` is None or it was measured.
        score: 1 where the answer is right, 0 where it is not, or chrF or ROUGE-L; None where its prompt has no
            reference.
        copied_4grams: share of its 4-grams that stand in its prompt; None if it is shorter or unknown.
        repeated_4grams: share of its 4-grams that occurred earlier in it; None if it is shorter or unknown.
        coverage: share of its words that lie in fragments of its prompt, see
            :func:`fsd_infer.engine.ngrams.coverage`; of answers scored by ROUGE, which copies raise.
        other_language: 1 where it is in another language than its reference, else 0; of answers scored by chrF.
        regrets: of the drafter's first choices, as :meth:`fsd_infer.engine.drafts.Drafts.regrets` has them; empty if
            unknown.
        final: what it says in the end, see :func:`fsd_bench.measures.final_answer`.
        trace: of sweeps.
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
    trace: Trace | None = None

    @property
    def length(self) -> int:
        """New tokens."""
        return self.counted if self.tokens is None else len(self.tokens)


@dataclass
class TimedRun:
    """One timed call on one group of prompts: wall seconds, the part until the first token, seconds by phase."""

    seconds: float
    prefill_seconds: float
    answers: list[Answer]
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What every method did with one group of prompts once; ``prompts`` are indices."""

    group: int
    repeat: int
    prompts: list[int]
    runs: dict[str, TimedRun]

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Each with its prompt's index."""
        for run in self.runs.values():
            yield from zip(self.prompts, run.answers, strict=True)


class Method(ABC):
    """One way to decode. ``options`` of :meth:`answer` are keyword arguments of transformers' ``generate``.

    Attributes:
        name: what tables and records call it.
    """

    name: str

    @abstractmethod
    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        """Decode one group of prompts, timed."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a record stores about the method."""

    def close(self) -> None:  # noqa: B027 (most methods hold nothing)
        """Free what it holds beyond this process's memory."""


def typed(value: Any, hint: Any) -> Any:
    """A JSON value as an annotated type: numbers, texts, and lists, dicts, unions and dataclasses of them.

    Raises TypeError, KeyError or ValueError for a value of another type.
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
    raise TypeError(f"{value!r:.60} is no {hint}")


_hints = cache(get_type_hints)
