"""Later user turns of a conversation: each method continues its own answers, as MT-Bench asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsd_bench.base import TimedRun
from fsd_bench.prompts import Encoder
from fsd_bench.runs import Trial
from fsd_core.text.conversations import Message, row_exchanges
from fsd_core.text.encoding import PromptRow


def with_later_turns(rows: Sequence[PromptRow], most: int | None) -> tuple[list[PromptRow], dict[int, int]]:
    """Return the rows, then a row per second turn, per third and so on; and of those the place of the turn before.

    Args:
        rows: conversations up to their first turn to answer.
        most: user turns of a conversation that are asked; None: all.
    """
    found, before = list(rows), dict[int, int]()
    asked = {place: row_exchanges(row.row, row.where) for place, row in enumerate(rows) if row.row.get("turns")}
    last, number = {place: place for place in asked}, 2
    while number <= (most or number):
        longer = [place for place, exchanges in asked.items() if len(exchanges) >= number]
        if not longer:
            break
        for place in longer:
            row = rows[place]
            before[len(found)], last[place] = last[place], len(found)
            turn = asked[place][number - 1][0]
            found.append(replace(row, id=f"{row.id}-{number}", messages=turn, where=f"{row.where}, turn {number}"))
        number += 1
    return found, before


@dataclass
class TurnPrompts:
    """The prompts of trials. A later turn's holds the method's own answers to the turns before.

    Args:
        rows: of :func:`with_later_turns`.
        before: of :func:`with_later_turns`.
        groups: places of the rows that are decoded together; a turn's group comes before the next turn's.
        encode: of the target.
        first: token ids of the rows that continue nothing, in order.
    """

    rows: Sequence[PromptRow]
    before: Mapping[int, int]
    groups: Sequence[Sequence[int]]
    encode: Encoder
    first: Sequence[list[int]]
    _places: dict[int, tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        places = [(place, (number, at)) for number, group in enumerate(self.groups) for at, place in enumerate(group)]
        self._places = dict(places)

    def __call__(self, trial: Trial, runs: Mapping[Trial, TimedRun]) -> list[list[int]]:
        """Return the token ids of a trial's prompts. Raises DataError for one that fills the context."""
        return [
            self.encode.conversation(self.rows[place], self._turns(place, trial, runs))
            if place in self.before
            else self.first[place]
            for place in self.groups[trial.group]
        ]

    def _turns(self, place: int, trial: Trial, runs: Mapping[Trial, TimedRun]) -> list[Message]:
        """Return the conversation up to a row's turn, with the method's answers."""
        messages = list(self.rows[place].messages)
        while place in self.before:
            place = self.before[place]
            group, at = self._places[place]
            answer = runs[replace(trial, group=group)].answers[at]
            text = answer.text or self.encode.tokenizer.decode(answer.tokens or [], skip_special_tokens=True)
            messages = [*self.rows[place].messages, {"role": "assistant", "content": text}, *messages]
        return messages
