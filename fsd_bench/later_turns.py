"""Later user turns of a conversation: each method continues its own answers, as MT-Bench asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsd_bench.base import TimedRun
from fsd_bench.prompts import Encoder
from fsd_bench.runs import Trial
from fsd_core.text.conversations import Message, row_exchanges
from fsd_core.text.encoding import PromptRow


def with_later_turns(rows: Sequence[PromptRow], max_turns: int | None) -> tuple[list[PromptRow], dict[int, int]]:
    """Return the rows and then one per later turn, and of each of these the index of the turn before.

    Args:
        rows: conversations up to their first turn to answer.
        max_turns: user turns of a conversation that are asked; None: all.
    """
    turns, previous = list(rows), dict[int, int]()
    exchanges = {index: row_exchanges(row.row, row.where) for index, row in enumerate(rows) if row.row.get("turns")}
    latest, number = {index: index for index in exchanges}, 2
    while number <= (max_turns or number):
        continued = [index for index, of_row in exchanges.items() if len(of_row) >= number]
        if not continued:
            break
        for index in continued:
            row, messages = rows[index], exchanges[index][number - 1][0]
            previous[len(turns)], latest[index] = latest[index], len(turns)
            turns.append(replace(row, id=f"{row.id}-{number}", messages=messages, where=f"{row.where}, turn {number}"))
        number += 1
    return turns, previous


@dataclass
class TurnPrompts:
    """The prompts of trials. A later turn's holds the method's own answers to the turns before.

    Args:
        rows: as returned by :func:`with_later_turns`.
        before: as returned by :func:`with_later_turns`.
        groups: indices of the rows that are decoded together; a turn's group comes before the next turn's.
        encode: the target's encoder.
        first: token ids of the rows that continue nothing, in order.
    """

    rows: Sequence[PromptRow]
    before: Mapping[int, int]
    groups: Sequence[Sequence[int]]
    encode: Encoder
    first: Sequence[list[int]]
    _in_group: dict[int, tuple[int, int]] = field(init=False)  # by row, its group, and its index there

    def __post_init__(self) -> None:
        self._in_group = {
            index: (group, place) for group, indices in enumerate(self.groups) for place, index in enumerate(indices)
        }

    def __call__(self, trial: Trial, runs: Mapping[Trial, TimedRun]) -> list[list[int]]:
        """Return the token ids of a trial's prompts. Raises DataError for one that fills the context."""
        return [
            self.encode.conversation(self.rows[index], self._turns(index, trial, runs))
            if index in self.before
            else self.first[index]
            for index in self.groups[trial.group]
        ]

    def _turns(self, index: int, trial: Trial, runs: Mapping[Trial, TimedRun]) -> list[Message]:
        """Return the conversation up to a row's turn, with the method's answers."""
        messages = list(self.rows[index].messages)
        while index in self.before:
            index = self.before[index]
            group, place = self._in_group[index]
            answer = runs[replace(trial, group=group)].answers[place]
            text = answer.text or self.encode.tokenizer.decode(answer.tokens or [], skip_special_tokens=True)
            messages = [*self.rows[index].messages, {"role": "assistant", "content": text}, *messages]
        return messages
