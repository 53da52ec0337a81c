"""Read prompts from data files, and encode messages as token ids by the chat template.

Decoding and training both encode conversations here, so their ids agree.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsd_infer.chat.control import encode_hidden, encode_marked, hidden, hidden_options, hidden_turns
from fsd_infer.chat.conversations import Message, check_messages, check_text, row_messages
from fsd_infer.chat.pieces import special_names
from fsd_infer.chat.rows import read_rows
from fsd_infer.errors import DataError, FsdError

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a data file.

    Attributes:
        id: hash of file name, line and messages, see :func:`row_id`.
        messages: the conversation up to the turn to answer.
        source: the row's ``source`` or ``category``, else the file's name without suffixes.
        file: name of the file.
        line: number of the line or table row, from 1.
        row: the whole row.
    """

    id: str
    messages: list[Message]
    source: str
    file: str
    line: int
    row: Mapping[str, Any]


def row_id(file_name: str, line: int, messages: Sequence[Message]) -> str:
    """Return a hash of 16 hexadecimal digits.

    Args:
        file_name: without its directory.
        line: number of the line, from 1.
        messages: the conversation.
    """
    text = json.dumps([file_name, line, list(messages)], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_prompts(path: str | Path) -> Iterator[PromptRow]:
    """Yield every prompt of a data file or directory.

    Args:
        path: as for :func:`fsd_infer.chat.rows.read_rows`.

    Raises:
        DataError: a malformed row. The error names file and line.
    """
    default_source = Path(path).name.split(".")[0]
    for row in read_rows(path):
        messages = row_messages(row.values, row.where)
        source = row.values.get("source") or row.values.get("category") or default_source
        identity = row_id(row.file.name, row.number, messages)
        yield PromptRow(identity, messages, str(source), row.file.name, row.number, row.values)


def need_tokenizer(tokenizer: Any, target: str) -> Any:
    """Return ``tokenizer``. Raise FsdError if it is None; ``target`` names the target in the error."""
    if tokenizer is None:
        raise FsdError(f"target {target} has no tokenizer: add its tokenizer files, or give prompts as token ids.")
    return tokenizer


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a conversation under the tokenizer's chat template.

    Names of special tokens in messages and tools are text, unless :func:`.set_control_tokens` says otherwise.

    A tokenizer without a template encodes one user turn as plain text with its special tokens, which a base model
    continues.

    Args:
        tokenizer: a transformers tokenizer.
        messages: the turns.
        add_generation_prompt: whether to end with the template's opening of an assistant turn.
        options: further arguments of the template, such as ``tools`` or ``enable_thinking``.

    Raises:
        DataError: an empty text, turns that the template rejects, or several turns or options without a template.
    """
    turns = check_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        if [turn["role"] for turn in turns] != ["user"]:
            raise DataError("this tokenizer has no chat template. Give one user turn and nothing else.")
        if options:
            raise DataError(f"this tokenizer has no chat template. Leave out {', '.join(options)}.")
        ids = encode_hidden(tokenizer, hidden(tokenizer, turns[0]["content"]), add_special_tokens=True)
    else:
        ids = _encode_rendered(tokenizer, _render(tokenizer, turns, add_generation_prompt, options))
    if not ids:
        raise DataError("the prompt encodes to no tokens. Give it some text.")
    return ids


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping[str, object]],
    complete: bool = True,
    options: Mapping[str, Any] | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Return the token ids of a conversation, and a mask of the ids that the target produces.

    The mask covers the text of each assistant turn and its end token. It covers neither the template's opening of the
    turn nor the text after the end token. Ids after the last end token are cut off.

    A template with generation markers (``{% generation %}``) marks the answers itself. Under another template a turn's
    answer is the ids that it adds to its prompt's. Some templates change earlier turns as a conversation grows: Qwen3's
    shows thoughts in the last answer only. Then each assistant turn becomes a sequence of its own, as decoding sees it.

    Args:
        tokenizer: a transformers tokenizer.
        messages: turns, of which the last is the assistant's and the first is not.
        complete: False if a length limit cut off the last answer, which then has no end token.
        options: further arguments of the template, as for :func:`encode_chat`.

    Returns:
        Pairs (ids, mask) of lists of one length. The mask is 1 on answer tokens, 0 elsewhere. There is one pair, or one
        per assistant turn.

    Raises:
        DataError: no assistant turn at the end, or one at the beginning. Markers that leave out a turn. A template
            without markers that changes a prompt's ids when its answer follows.
    """
    turns = check_messages(messages)
    if turns[-1]["role"] != "assistant" or turns[0]["role"] == "assistant":
        raise DataError("a conversation to train on must end with an assistant turn, and not begin with one.")
    if not getattr(tokenizer, "chat_template", None):
        prompt = encode_chat(tokenizer, turns[:-1], options=options)
        answer = _encode_rendered(tokenizer, hidden(tokenizer, turns[-1]["content"]))
        if complete and tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        return [(prompt + answer, [0] * len(prompt) + [1] * len(answer))]

    marked = bool(getattr(tokenizer, "is_fast", False) and _MARKER.search(tokenizer.get_chat_template()))
    found = [_spans_by_markers(tokenizer, turns, options)] if marked else _spans_by_prefix(tokenizer, turns, options)
    last = len(found) - 1
    return [_masked(tokenizer, *one, marked, complete or number < last) for number, one in enumerate(found)]


def _masked(
    tokenizer: Any, whole: list[int], spans: Sequence[tuple[int, int]], marked: bool, complete: bool
) -> tuple[list[int], list[int]]:
    """Return ids and mask up to the last answer's end. ``spans`` are the bounds of assistant turns in the ids."""
    enders = special_ids(tokenizer)
    mask = [0] * len(whole)
    end = 0
    for number, (start, closed) in enumerate(spans):
        end = closed
        while end > start and whole[end - 1] not in enders:
            end -= 1
        if end == start or (marked and tokenizer.decode(whole[end:closed]).strip()):
            end = closed  # no special token closes the turn
        elif number == len(spans) - 1 and not complete:
            end -= 1
        mask[start:end] = [1] * (end - start)
    return whole[:end], mask[:end]


_Spans = tuple[list[int], list[tuple[int, int]]]  # ids, and the bounds of assistant turns in them


def _spans_by_prefix(tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None) -> list[_Spans]:
    """Find the spans by comparing the ids of each prompt with and without its answer."""
    answered: list[_Spans] = []
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt = encode_chat(tokenizer, turns[:number], options=options)
        closed = _encode_rendered(tokenizer, _render(tokenizer, turns[: number + 1], False, options))
        if closed[: len(prompt)] != prompt:
            raise DataError(
                f"chat template: the ids of the prompt before assistant turn {number} are not a prefix of the ids of "
                "prompt and answer, so training would not see what decoding sees. Train on rows that carry prompt_ids "
                "and response_ids (`fsd-train regenerate` writes them), or fix the template."
            )
        answered.append((closed, [(len(prompt), len(closed))]))
    whole = answered[-1][0]
    if all(whole[: len(part)] == part for part, _ in answered):
        return [(whole, [span for _, spans in answered for span in spans])]
    return answered


def _spans_by_markers(tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None) -> _Spans:
    """Find the spans by the template's generation markers."""
    try:
        ids, mask = encode_marked(tokenizer, turns, options or {})
    except Exception as error:
        raise _refusal(turns, error) from error
    marks = [0, *mask, 0]
    edges = [place for place in range(len(marks) - 1) if marks[place] != marks[place + 1]]
    spans = list(zip(edges[::2], edges[1::2]))
    wanted = sum(turn["role"] == "assistant" for turn in turns)
    if len(spans) < wanted:
        raise DataError(
            f"chat template: its generation markers mark {len(spans)} of {wanted} assistant turns. "
            "Fix the template, or remove rows with empty answers."
        )
    return ids, spans


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the token that ends an answer: the chat template's, else the tokenizer's eos, else None."""
    if getattr(tokenizer, "chat_template", None):
        word = "Rhubarb"  # no template contains it
        turns: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": word}]
        suffix = _render(tokenizer, turns, False).partition(word)[2]
        special = special_ids(tokenizer)
        for token in _encode_rendered(tokenizer, suffix):
            if token in special:
                return token
    own: int | None = tokenizer.eos_token_id
    return own


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokenizer's special tokens: named ones such as eos, and added ones."""
    return set(special_names(tokenizer))


def _render(
    tokenizer: Any, turns: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any] | None = None
) -> str:
    given = {**hidden_options(tokenizer, options), "tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        return str(tokenizer.apply_chat_template(hidden_turns(tokenizer, turns), **given))
    except Exception as error:  # a template is a program of the model's author
        raise _refusal(turns, error) from error


def _refusal(turns: Sequence[Message], error: Exception) -> DataError:
    # templates reject unknown roles, or an order of turns
    roles = ", ".join(turn["role"] for turn in turns)
    return DataError(f"the chat template refuses a conversation of the roles {roles}: {error}")


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of plain text with the tokenizer's special tokens. Raise DataError for invalid Unicode."""
    return list(tokenizer(check_text(text, "the prompt"))["input_ids"])


def _encode_rendered(tokenizer: Any, text: str) -> list[int]:
    # the template has written the special tokens itself
    return encode_hidden(tokenizer, text)
