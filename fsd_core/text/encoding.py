"""Read prompts from data files, and encode messages as token ids by the chat template.

Decoding and training both encode conversations here, so their ids agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from fsd_core.errors import DataError, FsdError
from fsd_core.text.control import encode_escaped, escaped, escaped_options, escaped_turns
from fsd_core.text.conversations import Message, check_messages, check_text, row_messages, template_options
from fsd_core.text.image_marks import expanded, in_parts
from fsd_core.text.image_rows import has_row_images, take_images
from fsd_core.text.pieces import special_names
from fsd_core.text.row_check import RowCheck, RowFields
from fsd_core.text.rows import read_rows
from fsd_core.text.templates import WORD, turns_for


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
        where: "path:line", for errors.
        images: that its messages have marks for, see :func:`.take_images`.
    """

    id: str
    messages: list[Message]
    source: str
    file: str
    line: int
    row: Mapping[str, Any]
    where: str = ""
    images: Sequence[Any] = ()


def row_id(file_name: str, line: int, messages: Sequence[Message]) -> str:
    """Return a hash of 16 hexadecimal digits.

    Args:
        file_name: without its directory.
        line: number of the line, from 1.
        messages: the conversation.
    """
    text = json.dumps([file_name, line, list(messages)], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_prompts(
    path: str | Path,
    check: RowCheck | None = None,
    convert: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    images: bool = False,
) -> Iterator[PromptRow]:
    """Yield every prompt of a data file or directory.

    Args:
        path: as for :func:`fsd_core.text.rows.read_rows`.
        check: takes account of the rows, and of malformed ones, which are skipped. None: those are errors.
        convert: maps a file's row to one of ours; may raise DataError.
        images: whether rows may have images; their messages then have marks of them.

    Raises:
        DataError: a file that cannot be read, or what ``check`` raises: the error names file and line.
    """
    check = check or RowCheck(strict=True)
    default_source = Path(path).name.split(".")[0]
    for row in read_rows(path, check):
        prompt: PromptRow | None = None
        with check.using(row.where):
            values = row.values if convert is None else RowFields(convert(row.values))
            shown: list[Any] = []
            if images and has_row_images(values):
                values, shown = take_images(values, row.folder)
            messages = row_messages(values, row.where)
            template_options(values)  # of the right types
            source = values.get("source") or values.get("category") or default_source
            identity = row_id(row.file.name, row.number, messages)
            prompt = PromptRow(identity, messages, str(source), row.file.name, row.number, values, row.where, shown)
        if prompt is not None:
            yield prompt


def need_tokenizer(tokenizer: Any, target: str) -> Any:
    """Return ``tokenizer``. Raise FsdError if it is None; ``target`` names the target in the error."""
    if tokenizer is None:
        raise FsdError(
            f"target {target} has no tokenizer: give one as tokenizer=, add its files, or give prompts as token ids."
        )
    return tokenizer


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, object]],
    add_generation_prompt: bool = True,
    options: Mapping[str, Any] | None = None,
    blank: bool = False,
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
        blank: whether a user turn may be only white space, as in a request.

    Raises:
        DataError: an empty text, turns that the template rejects, or several turns or options without a template.
    """
    turns = check_messages(messages, blank=blank)
    if not getattr(tokenizer, "chat_template", None):
        if [turn["role"] for turn in turns] != ["user"]:
            raise DataError("this tokenizer has no chat template. Give one user turn and nothing else.")
        if options:
            raise DataError(f"this tokenizer has no chat template. Leave out {', '.join(options)}.")
        ids = encode_escaped(tokenizer, escaped(tokenizer, turns[0]["content"]), add_special_tokens=True)
    else:
        ids = encode_rendered(tokenizer, render(tokenizer, turns, add_generation_prompt, options))
    if not ids:
        raise DataError("the prompt encodes to no tokens. Give it some text.")
    return ids


def end_of_turn(tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: those of the chat template, else the tokenizer's eos, else none.

    Command-R's template ends a turn by two.
    """
    if getattr(tokenizer, "chat_template", None):
        after, count = answer_end(tokenizer, [{"role": "user", "content": "?"}])
        if count:
            special = special_ids(tokenizer)
            return [token for token in after[:count] if token in special]
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def answer_end(
    tokenizer: Any, turns: Sequence[Message], options: Mapping[str, Any] | None = None
) -> tuple[list[int], int]:
    """Return the ids that a template writes after the answer to these turns, and how many of them end its turn.

    Phi-4-mini's writes <|end|> and, after only the last turn, eos, which its model does not write.
    """

    def after(*more: Message) -> list[int]:  # the answer's own text may hold special tokens too
        text = render(tokenizer, [*turns, {"role": "assistant", "content": WORD}, *more], False, options)
        _, word, rest = text.rpartition(WORD)
        return encode_rendered(tokenizer, rest if word else "")

    last, special = after(), special_ids(tokenizer)
    end = _turn_end(tokenizer, last, special)
    if sum(token in special for token in last[:end]) == 1:  # no other token could be one after the last turn alone
        return last, end
    try:
        before_more = after({"role": "user", "content": "?"})
    except DataError:  # a template for one question
        before_more = last
    common = [one for one, other in takewhile(lambda pair: pair[0] == pair[1], zip(last, before_more, strict=False))]
    return last, _turn_end(tokenizer, common, special) or end


def _turn_end(tokenizer: Any, ids: Sequence[int], special: set[int]) -> int:
    """Return how many of the ids that a template writes after an answer end its turn; 0: none does.

    They are the first special tokens in a row, up to eos. An opening of the next turn that a template always writes
    comes after the end.
    """
    end = next((index for index, token in enumerate(ids) if token in special), -1) + 1
    if 0 < end < len(ids) and ids[end] in special:
        opening = render(tokenizer, [{"role": "user", "content": WORD}], False).partition(WORD)[0]
        goes_on = special.difference(encode_rendered(tokenizer, opening))
        goes_on |= {tokenizer.eos_token_id} - {tokenizer.bos_token_id}  # with which an opening's system turn ends, too
        while end < len(ids) and ids[end] in goes_on and ids[end - 1] != tokenizer.eos_token_id:
            end += 1
    return end


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the tokenizer's special tokens: named ones such as eos, and added ones."""
    return set(special_names(tokenizer))


def render(
    tokenizer: Any, turns: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any] | None = None
) -> str:
    """Return what the chat template writes. Raises DataError if it refuses the turns, or writes no Unicode text."""
    return render_turns(tokenizer, turns_for(tokenizer, turns, options), add_generation_prompt, options)


def render_turns(
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return what the chat template writes of turns in its own form (:func:`.turns_for`); errors as :func:`render`."""
    arguments = escaped_options(tokenizer, options)
    arguments |= {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        text = str(tokenizer.apply_chat_template(in_parts(tokenizer, escaped_turns(tokenizer, turns)), **arguments))
    except Exception as error:  # a template is a program of the model's author
        raise template_error(turns, error) from error
    return check_text(expanded(tokenizer, turns, text)[0], "what the chat template writes")


def template_error(turns: Sequence[Mapping[str, Any]], error: Exception) -> DataError:
    """Return the error for turns that a template rejects, as some do with unknown roles or an order of turns."""
    roles = ", ".join(turn["role"] for turn in turns[:9]) + (f" and {len(turns) - 9} more" if len(turns) > 9 else "")
    return DataError(f"the chat template refuses a conversation of the roles {roles}: {error}")


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of plain text with the tokenizer's special tokens. Raise DataError for invalid Unicode."""
    return list(tokenizer(check_text(text, "the prompt"))["input_ids"])


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a chat template's text, which has its special tokens already."""
    return encode_escaped(tokenizer, text)
