"""Encode conversations for training: token ids as decoding sees them, with a mask of the ids that the target produces.

The time is linear in the number of turns if the template writes each exchange in the same way wherever it stands.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fsd_core.errors import DataError
from fsd_core.text.control import encode_with_offsets, escaped, render_marked
from fsd_core.text.conversations import WEIGHT, Message, check_messages
from fsd_core.text.encoding import answer_end, encode_chat, encode_rendered, render, special_ids, template_error
from fsd_core.text.templates import template_of, turns_for

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FEW = 8  # answers of a conversation whose prompts are all rendered
_CONTEXT = 64  # tokens before an answer that are encoded again, to compare the last half of them
_Encoded = tuple[list[int], list[int]]  # ids and mask


class _Answer(NamedTuple):
    """An assistant turn: its number, and its characters in a rendered text, with what ends the turn."""

    turn: int
    text: str
    start: int
    closed: int


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, object]],
    complete: bool = True,
    options: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> list[_Encoded]:
    """Return the token ids of a conversation, and a mask of the ids that the target produces.

    The mask covers the text of each assistant turn and its end token, except turns of weight 0. It covers neither the
    template's opening of the turn nor the text after the end token. Ids after the last end token are cut off.

    A template with generation markers (``{% generation %}``) marks the answers itself. Under another template a turn's
    answer is the text that it adds to its prompt's. Some templates change an answer, or its prompt, when the
    conversation goes on: Qwen3's and LFM2.5's show thoughts in the last one only. Then that answer becomes a sequence
    of its own, as decoding sees it. So does one whose first characters would join the last token of its prompt.

    Args:
        tokenizer: a transformers tokenizer.
        messages: turns; the last is the assistant's and the first is not.
        complete: False if a length limit cut off the last answer, which then has no end token.
        options: further arguments of the template, as for :func:`encode_chat`.
        max_length: answers that begin after so many tokens may be left out. None: none are.

    Returns:
        Pairs (ids, mask) of lists of one length. The mask is 1 on answer tokens, 0 elsewhere. There is one pair, or
        several with each answer masked in one of them; none if ``max_length`` leaves no answer.

    Raises:
        DataError: no assistant turn at the end, or one at the beginning, or only turns of weight 0. Markers that leave
            out a turn. A template whose text of a prompt does not go on in the text of its answer.
    """
    turns = check_messages(messages)
    if turns[-1]["role"] != "assistant" or turns[0]["role"] == "assistant":
        raise DataError("a conversation to train on must end with an assistant turn, and not begin with one.")
    if not any(_trained(turn) for turn in turns):
        raise DataError("every answer has weight 0, so nothing would be trained. Remove the row.")
    if not getattr(tokenizer, "chat_template", None):
        prompt = encode_chat(tokenizer, turns[:-1], options=options)
        answer = encode_rendered(tokenizer, escaped(tokenizer, turns[-1]["content"]))
        if complete and tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        return [(prompt + answer, [0] * len(prompt) + [1] * len(answer))]
    if getattr(tokenizer, "is_fast", False) and _MARKER.search(template_of(tokenizer, options)):
        return _by_markers(tokenizer, turns, options, complete)
    return _Encoder(tokenizer, turns, options, complete).sequences(max_length)


def _trained(turn: Message) -> bool:
    return turn["role"] == "assistant" and turn.get(WEIGHT) != 0


# characters ---------------------------------------------------------------------------------------------------------


def _answers(
    tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None, full_text: str
) -> Iterator[_Answer]:
    """Yield the answers in order, in ``full_text``, the text of all turns, or in a text that ends with them.

    Raises DataError if the text of a prompt does not go on in the text of its answer.
    """
    answer_turns = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if len(answer_turns) > _FEW:
        answers = _exchange_by_exchange(tokenizer, turns, options, full_text, answer_turns)
        if answers is not None:
            yield from answers
            return
    for number in answer_turns:
        prompt = render(tokenizer, turns[:number], True, options)
        through = full_text if number == answer_turns[-1] else render(tokenizer, turns[: number + 1], False, options)
        if not through.startswith(prompt):  # some templates show more of a prompt's last answer
            opening = prompt[len(render(tokenizer, turns[:number], False, options)) :]
            if opening and through.count(opening) == answer_turns.index(number) + 1:
                through = prompt + through.rpartition(opening)[2]
        if not through.startswith(prompt):
            raise DataError(
                f"chat template: the ids of the prompt before assistant turn {number} are not a prefix of the ids of "
                "prompt and answer, so training would not see what decoding sees. Train on rows that carry prompt_ids "
                "and response_ids (`fsd-train regenerate` writes them), or fix the template."
            )
        yield _Answer(number, full_text if full_text.startswith(through) else through, len(prompt), len(through))


def _exchange_by_exchange(
    tokenizer: Any,
    turns: Sequence[Message],
    options: Mapping[str, Any] | None,
    full_text: str,
    answer_turns: Sequence[int],
) -> list[_Answer] | None:
    """Find the answers by rendering each exchange after the first one, which takes time linear in their number.

    None: the pieces do not make up the whole text, so the template writes an exchange differently in other places.
    """
    first, last = answer_turns[0], answer_turns[-1]
    head, opening = list(turns[: first + 1]), render(tokenizer, turns[:first], True, options)
    base, prompt = render(tokenizer, head, False, options), render(tokenizer, turns[:last], True, options)
    if not (base.startswith(opening) and full_text.startswith(base) and full_text.startswith(prompt)):
        return None
    answers = [_Answer(first, full_text, len(opening), len(base))]
    begin, at = first + 1, len(base)
    for number in answer_turns[1:]:
        opened = render(tokenizer, [*head, *turns[begin:number]], True, options)
        closed = render(tokenizer, [*head, *turns[begin : number + 1]], False, options)
        piece = closed[len(base) :]
        if not (closed.startswith(opened) and opened.startswith(base) and full_text.startswith(piece, at)):
            return None
        answers.append(_Answer(number, full_text, at + len(opened) - len(base), at + len(piece)))
        begin, at = number + 1, at + len(piece)
    return answers if at == len(full_text) else None


# tokens -------------------------------------------------------------------------------------------------------------


class _Tokens:
    """The ids of a text, and which characters each stands for, if the tokenizer gives offsets."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.starts: list[int] | None = None
        if getattr(tokenizer, "is_fast", False):
            self.ids, offsets = encode_with_offsets(tokenizer, text)
            self.starts, self.ends = [start for start, _ in offsets], [end for _, end in offsets]
        else:
            self.ids = encode_rendered(tokenizer, text)

    def count(self, end: int) -> int | None:
        """Return how many ids stand for the first ``end`` characters; None if these alone have other ids."""
        if self.starts is not None:
            count = bisect_left(self.starts, end)
            if count and self.ends[count - 1] > end:
                return None
            begin = max(0, count - _CONTEXT)
            # what follows a text changes the ids at its end only
            again = encode_rendered(self.tokenizer, self.text[self.starts[begin] if begin else 0 : end])
            compared = count if not begin else _CONTEXT // 2
            if again[-compared:] == self.ids[count - compared : count] and (begin or len(again) == count):
                return count
        alone = encode_rendered(self.tokenizer, self.text[:end])
        return len(alone) if self.ids[: len(alone)] == alone else None

    def bounds(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first id and the end of a part of the text; None if a token joins it to what is around it."""
        first, last = self.count(start), len(self.ids) if end == len(self.text) else self.count(end)
        return None if first is None or last is None else (first, last)


def _continued(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text that goes on from another one, without the space that SentencePiece would begin with."""
    for before in ("x", "\n", ".") if getattr(tokenizer, "is_fast", False) else ():
        tokens = _Tokens(tokenizer, before + text)
        count = bisect_left(tokens.starts or [], len(before))
        if count and tokens.ends[count - 1] <= len(before):
            return tokens.ids[count:]
    return encode_rendered(tokenizer, text)


class _Encoder:
    """Encodes one conversation, see :func:`encode_conversation`."""

    def __init__(
        self, tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None, complete: bool
    ) -> None:
        self.tokenizer, self.turns, self.options, self.complete = tokenizer, turns, options, complete
        after, end = answer_end(tokenizer, turns[:-1], options)
        special = special_ids(tokenizer)
        self.ended = sum(token in special for token in after[:end])  # tokens that end a turn
        self.rest = len(after) - end if end else 0

    def sequences(self, max_length: int | None) -> list[_Encoded]:
        """Return the sequences of single answers, then that of the other answers in the whole conversation."""
        tokens = _Tokens(self.tokenizer, render(self.tokenizer, self.turns, False, self.options))
        separate: list[_Encoded] = []
        shared: list[tuple[int, int]] = []  # first token and end
        for answer in _answers(self.tokenizer, self.turns, self.options, tokens.text):
            if not _trained(self.turns[answer.turn]):
                continue
            bounds = tokens.bounds(answer.start, answer.closed) if answer.text is tokens.text else None
            if bounds is not None:
                start, end = bounds
                shared.append((start, end - self._cut(answer)))
            else:
                ids, start = self._alone(answer)
                ids = ids[: len(ids) - self._cut(answer)]
                separate.append((ids, [0] * start + [1] * (len(ids) - start)))
            if start == 0:
                raise DataError("the prompt encodes to no tokens. Give it some text.")
            if max_length is not None and start >= max_length:
                break  # the prompts of later answers are longer
        return [*separate, *([_masked(tokens.ids, shared)] if shared else [])]

    def _cut(self, answer: _Answer) -> int:
        """Return how many tokens to leave out at the end of an answer: those after its end, and that if cut off."""
        unfinished = not self.complete and answer.turn == len(self.turns) - 1
        return self.rest + self.ended * unfinished

    def _alone(self, answer: _Answer) -> tuple[list[int], int]:
        """Return the ids of an answer after those of its prompt, which end where that text ends, and their number."""
        prompt = encode_rendered(self.tokenizer, answer.text[: answer.start])
        tokens = _Tokens(self.tokenizer, answer.text[: answer.closed])
        if tokens.ids[: len(prompt)] == prompt:
            return tokens.ids, len(prompt)
        return prompt + _continued(self.tokenizer, answer.text[answer.start : answer.closed]), len(prompt)


def _masked(ids: list[int], spans: Sequence[tuple[int, int]]) -> _Encoded:
    """Return ids and mask up to the end of the last span."""
    mask = [0] * len(ids)
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    end = spans[-1][1]
    return ids[:end], mask[:end]


def _by_markers(
    tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None, complete: bool
) -> list[_Encoded]:
    """Find the answers by the template's generation markers."""
    readable = turns_for(tokenizer, turns, options)
    try:
        text, marked = render_marked(tokenizer, readable, options or {})
    except Exception as error:
        raise template_error(turns, error) from error
    marked = [part for part in marked if part[0] < part[1]]
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if len(marked) < len(answers):
        raise DataError(
            f"chat template: its generation markers mark {len(marked)} of {len(answers)} assistant turns. "
            "Fix the template, or remove rows with empty answers."
        )
    ids, offsets = encode_with_offsets(tokenizer, text)
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    separate, shared, enders = list[_Encoded](), list[tuple[int, int]](), special_ids(tokenizer)
    for answer in _marked_answers(tokenizer, turns, options, text, marked):
        if not _trained(turns[answer.turn]):
            continue
        parts, is_shared = [(answer.start, answer.closed)], answer.text is text
        if is_shared:
            parts = [part for part in marked if part[0] < answer.closed and part[1] > answer.start]
        for begin, end in parts:
            has_end = complete or answer.turn < len(turns) - 1 or end < marked[-1][1]
            first, closed = bisect_right(stops, begin), bisect_left(starts, end)
            if not is_shared or first < closed and starts[first] < begin:  # decoding reads its prompt alone
                prompt = encode_rendered(tokenizer, answer.text[:begin])
                ids_alone = prompt + _continued(tokenizer, answer.text[begin:end])
                last = _marked_end(tokenizer, enders, ids_alone, len(prompt), len(ids_alone), has_end)
                separate.append(_masked(ids_alone, [(len(prompt), last)]))
            else:
                shared.append((first, _marked_end(tokenizer, enders, ids, first, closed, has_end)))
    return [*separate, *([_masked(ids, shared)] if shared else [])]


def _marked_answers(
    tokenizer: Any,
    turns: Sequence[Message],
    options: Mapping[str, Any] | None,
    text: str,
    marked: Sequence[tuple[int, int]],
) -> list[_Answer]:
    """Return the answers as decoding sees them; as they are marked where their prompts do not go on in them, as with a
    template that opens a thought which earlier answers do not have.
    """
    try:
        return list(_answers(tokenizer, turns, options, text))
    except DataError:
        numbers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        if len(marked) != len(numbers):
            raise
        return [_Answer(number, text, *part) for number, part in zip(numbers, marked, strict=True)]


def _marked_end(tokenizer: Any, enders: set[int], ids: Sequence[int], start: int, closed: int, complete: bool) -> int:
    """Return where a marked part ends: after the last special token, unless more than blanks follow it."""
    end = closed
    while end > start and ids[end - 1] not in enders:
        end -= 1
    if end == start or tokenizer.decode(ids[end:closed]).strip():
        return closed  # no special token closes the turn
    return end if complete else end - 1
