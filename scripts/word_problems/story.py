"""A problem in the making: sentences from templates, numbers, and the work that leads to the answer.

Templates: ``{name}`` is a slot, ``[a|b]`` a free choice, ``<is|was>`` a choice by the story's tense (present, past).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from word_problems import words
from word_problems.words import Person

Number = int | Decimal
T = TypeVar("T")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_TENSE = re.compile(r"<([^<>|]*)\|([^<>|]*)>")
MOST = 9999


class Reject(Exception):
    """This story does not work out; the caller makes another."""


@dataclass(frozen=True)
class Problem:
    """A problem and its worked answer.

    Attributes:
        question: the text.
        steps: lines of work with one equation each.
        answer: the result.
        kind: name of the situation.
        unseen: at least one sentence has a wording that training problems never have.
    """

    question: str
    steps: tuple[str, ...]
    answer: Number
    kind: str
    unseen: bool

    @property
    def solution(self) -> str:
        """The work and, in a last line, the result in GSM8K's form."""
        return "\n".join([*self.steps, f"#### {plain(self.answer)}"])


@dataclass(frozen=True)
class Situation:
    """Tells stories of one kind, of as many steps as asked for; ``held_out``: held-out problems have it too."""

    tell: Callable[[Story, int], None]
    steps: range
    weight: float = 1.0
    held_out: bool = True

    @property
    def name(self) -> str:
        return self.tell.__name__


def plain(value: Number) -> str:
    """A number as equations show it: 12, 2.5."""
    text = str(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


class Story:
    """Collects sentences and steps.

    Args:
        rng: where all choices come from.
        unseen: see :func:`word_problems.make_problem`.
    """

    def __init__(self, rng: random.Random, unseen: bool = False) -> None:
        self.rng = rng
        self.unseen = unseen
        self.new_wording = False
        self.tense = rng.choice((0, 1, 1))
        self.in_words = 0.6 if rng.random() < 0.2 else 0.0  # chance that a small number is written out
        self.commas = rng.random() < 0.5
        self.dollar_sign = rng.random() < 0.8
        self.sizes = rng.choices(((2, 12), (3, 30), (8, 99), (40, 600)), (3, 4, 4, 1))[0]
        self.slots: dict[str, Any] = {}
        self.sentences: list[str] = []
        self.question = ""
        self.lines: list[str] = []
        self.answer: Number | None = None
        self._names: set[str] = set()

    # choices -------------------------------------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        """One of the options. Of four and more the last tenth (at least one) is for held-out problems only."""
        kept = max(1, len(options) // 10) if len(options) >= 4 else 0
        if kept and self.unseen and self.rng.random() < 0.5:
            return self.rng.choice(options[len(options) - kept :])
        return self.rng.choice(options[: len(options) - kept])

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Different ones of the options."""
        found: list[T] = []
        while len(found) < count:
            one = self.pick(options)
            if one not in found:
                found.append(one)
        return found

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self, low: int | None = None, high: int | None = None) -> int:
        """A whole number between bounds, by default of the story's size."""
        low, high = self.sizes[0] if low is None else low, self.sizes[1] if high is None else high
        if high < low:
            raise Reject
        value = self.rng.randint(low, high)
        if high >= 100 and value > 20 and self.rng.random() < 0.4:
            value = max(low, value // 10 * 10)
        return value

    def few(self, high: int = 12) -> int:
        """A small factor."""
        return self.rng.randint(2, high)

    def divisor(self, value: Number, high: int = 12) -> int:
        """A number from 2 to ``high`` that divides the value. Rejects the story if there is none."""
        found = [n for n in range(2, high + 1) if value % n == 0 and value // n > 1]
        if not found:
            raise Reject
        return self.rng.choice(found)

    def person(self, slot: str = "who") -> Person:
        """Someone new, in the slots ``who``, ``who_he``, ``who_him`` and ``who_his`` (and ``he`` ... for ``who``)."""
        while True:
            someone = self.pick(words.PEOPLE)
            if someone.name not in self._names:
                break
        self._names.add(someone.name)
        self.slots |= {slot: someone.name, f"{slot}_he": someone.he, f"{slot}_him": someone.him}
        self.slots[f"{slot}_his"] = someone.his
        if slot == "who":
            self.slots |= {"he": someone.he, "him": someone.him, "his": someone.his}
        return someone

    def set(self, **slots: Any) -> None:
        """Fill slots for all sentences to come."""
        self.slots |= slots

    # sentences -----------------------------------------------------------------------------------------------------

    def say(self, *templates: str, **slots: Any) -> None:
        """Add a sentence."""
        self.sentences.append(self._sentence(templates, slots))

    def ask(self, *templates: str, **slots: Any) -> None:
        """Set the question."""
        self.question = self._sentence(templates, slots)

    def phrase(self, *templates: str, **slots: Any) -> str:
        """Part of a sentence."""
        chosen = self.pick(templates)
        self.new_wording |= len(templates) >= 4 and templates.index(chosen) >= len(templates) - max(
            1, len(templates) // 10
        )
        return self.fill(chosen, slots, self.shown)

    def work(self, templates: Sequence[str] | str, left: Number, sign: str, right: Number, **slots: Any) -> Number:
        """Add a step; ``{eq}`` in the template is its equation. Returns the result. Rejects uneven or odd numbers."""
        result = evaluate(left, sign, right)
        if result < 0 or result > MOST or (isinstance(result, Decimal) and result != result.quantize(Decimal("0.01"))):
            raise Reject
        equation = f"{plain(left)} {sign} {plain(right)} = {plain(result)}"
        template = self.rng.choice([templates] if isinstance(templates, str) else templates)
        line = self.fill(template, {"eq": equation, **slots}, lambda value: plain(value))
        self.lines.append(upper(line))
        self.answer = result
        return result

    def shown(self, value: Number) -> str:
        """A number as the problem shows it: digits, or a word."""
        if isinstance(value, int) and 2 <= value <= 20 and self.rng.random() < self.in_words:
            return words.WHOLE[value]
        return f"{value:,}" if self.commas and value >= 1000 else plain(value)

    def dollars(self, value: Number) -> str:
        """An amount of money as the problem shows it."""
        if isinstance(value, Decimal) and value != int(value):
            return f"${value:.2f}"
        return f"${value:,}" if self.dollar_sign else f"{plain(value)} dollars"

    def distract(self, share: float = 0.12) -> None:
        """Now and then a sentence with a number that has nothing to do with the question."""
        if not self.chance(share):
            return
        if "other" not in self.slots:
            self.person("other")
        self.say(
            "{other} is {n} years old.",
            "The [shop|market|school] is {n} [minutes|blocks] away.",
            "It <is|was> [day {n} of the month|{n} degrees outside].",
            "{other} <has|had> {n} {odd} at home.",
            "{other}'s [house|apartment] number is {n}.",
            "{who} <talks|talked> to {other} for {n} minutes.",
            "They <have known|had known> each other for {n} years.",
            n=self.number(4, 40),
            odd=self.pick(words.COLLECTED),
            **({} if "who" in self.slots else {"who": "Someone"}),
        )

    def fill(self, template: str, slots: dict[str, Any], shown: Callable[[Number], str]) -> str:
        """A template with choices made and slots filled."""
        while found := _CHOICE.search(template):
            template = template[: found.start()] + self.rng.choice(found[1].split("|")) + template[found.end() :]
        template = _TENSE.sub(lambda found: found[1 + self.tense], template)
        values = {**self.slots, **slots}
        filled = {
            name: shown(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else value
            for name, value in values.items()
        }
        text = re.sub(r"  +", " ", template.format(**filled)).strip()
        return re.sub(r" ([.,;?!])", r"\1", text)

    def _sentence(self, templates: tuple[str, ...], slots: dict[str, Any]) -> str:
        return upper(self.phrase(*templates, **slots))

    def problem(self, kind: str, steps: int) -> Problem:
        """The finished problem. Rejects one of another number of steps, or of a result that nobody would ask for."""
        if self.answer is None or len(self.lines) != steps or not self.question or self.answer == 0:
            raise Reject
        if self.unseen and not self.new_wording:
            raise Reject
        return Problem(
            " ".join([*self.sentences, self.question]), tuple(self.lines), self.answer, kind, self.new_wording
        )


def evaluate(left: Number, sign: str, right: Number) -> Number:
    """Result of an operation; quotients must come out even (Reject otherwise)."""
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    if isinstance(left, int) and isinstance(right, int):
        if right == 0 or left % right:
            raise Reject
        return left // right
    result = (Decimal(left) / Decimal(right)).normalize()
    if result != result.quantize(Decimal("0.01")):
        raise Reject
    return result


def upper(text: str) -> str:
    """With a capital letter at the beginning of every sentence."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda found: found[1] + found[2].upper(), text)
