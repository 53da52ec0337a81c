"""Prompts and chat templates: from rows of a data file to messages, and from messages to token ids.

Decoding and training both encode conversations here and nowhere else, so they cannot drift apart.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from jinja2 import TemplateError

from fsd_infer.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a data file.

    Attributes:
        id: stable hash of file name, line and messages.
        messages: the conversation up to and including the turn that wants an answer.
        source: the row's ``source`` or ``category``, else the file's name without suffixes.
        file, line: where the row stands (lines count from 1).
        row: the whole row as read.
    """

    id: str
    messages: list[Message]
    source: str
    file: str
    line: int
    row: Mapping[str, Any]


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number from 1, object) of a JSONL file, gzip-compressed or not; blank lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is not a UTF-8 JSON object; names file and line.
    """
    path = Path(path)
    line = 0
    try:
        with open(path, "rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else open(path, "rb") as lines:
            for line, raw in enumerate(lines, start=1):
                if raw.strip():
                    yield line, _parse(raw, f"{path}:{line}")
    except (OSError, EOFError, zlib.error) as error:  # a truncated gzip file raises EOFError or zlib.error
        if not path.is_file():
            raise DataError(f"{path}: no such file. Give the path of a .jsonl or .jsonl.gz file.") from error
        raise DataError(f"{path}: unreadable after line {line} ({error}). Fetch or write the file again.") from error


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}). Mend or remove the line.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}. Write one object per line.")
    return row


def row_messages(row: Mapping[str, Any], where: str = "row") -> list[Message]:
    """The conversation a row asks to be answered.

    Reads ``messages`` (a final assistant turn is a reference answer and is dropped), ``prompt``, ``question`` or
    ``turns`` (the first one), in this order.

    Args:
        row: one row of a prompt file.
        where: how errors name the row, "file:line".

    Raises:
        DataError: none of the fields is there, or one has the wrong type or is empty.
    """
    if "messages" in row:
        messages = check_messages(row["messages"], where)
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages or messages[-1]["role"] == "system":
            raise DataError(f"{where}: `messages` holds no turn to answer. End it with a user turn.")
        return messages
    for field in ("prompt", "question", "turns"):
        if field in row:
            text = row[field]
            if field == "turns" and isinstance(text, list) and text:
                text = text[0]
            if not isinstance(text, str):
                raise DataError(f"{where}: `{field}` must hold text, found {type(text).__name__}.")
            if not text.strip():
                raise DataError(f"{where}: `{field}` is empty. Give the prompt some text or remove the line.")
            return [{"role": "user", "content": text}]
    raise DataError(f"{where}: no prompt. Give one of the fields messages, prompt, question, turns.")


def check_messages(messages: Any, where: str = "messages") -> list[Message]:
    """``messages`` as plain role/content dicts. Raises DataError where it is not a list of chat turns."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise DataError(f"{where}: messages must be a list of at least one turn.")
    checked: list[Message] = []
    for number, turn in enumerate(messages):
        if not isinstance(turn, Mapping):
            raise DataError(f"{where}: turn {number} must be an object with `role` and `content`.")
        role, content = turn.get("role"), turn.get("content")
        if role not in ROLES:
            raise DataError(f"{where}: turn {number} has role {role!r}; known roles are {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise DataError(f"{where}: turn {number} ({role}) must have `content` of type text.")
        if role == "user" and not content.strip():
            raise DataError(f"{where}: turn {number} (user) is empty. Give it some text or remove the row.")
        checked.append({"role": role, "content": content})
    return checked


def row_id(file_name: str, line: int, messages: Sequence[Message]) -> str:
    """16 hexadecimal digits that depend on the file's name (not its folder), the line and the messages."""
    text = json.dumps([file_name, line, list(messages)], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_prompts(path: str | Path) -> Iterator[PromptRow]:
    """Yields every prompt of a .jsonl or .jsonl.gz file. Raises DataError (with file and line) on a malformed row."""
    path = Path(path)
    default_source = path.name.split(".")[0]
    for line, row in read_jsonl(path):
        messages = row_messages(row, f"{path}:{line}")
        source = row.get("source") or row.get("category") or default_source
        yield PromptRow(row_id(path.name, line, messages), messages, str(source), path.name, line, row)


def encode_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of a conversation under the tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer. Without a chat template the only conversation it can encode is one user
            turn, taken as plain text with the tokenizer's own special tokens (a base model continues it).
        messages: the turns.
        add_generation_prompt: end with the template's opening of an assistant turn, so that the target answers.

    Raises:
        DataError: no chat template and more than one turn, nothing but an empty text, or turns the template refuses.
    """
    turns = check_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        if [turn["role"] for turn in turns] != ["user"]:
            raise DataError("this tokenizer has no chat template, so it can encode one user turn only.")
        ids = list(tokenizer(turns[0]["content"])["input_ids"])
    else:
        ids = _encode_text(tokenizer, _render(tokenizer, turns, add_generation_prompt))
    if not ids:
        raise DataError("the prompt encodes to no tokens. Give it some text.")
    return ids


def encode_conversation(
    tokenizer: Any, messages: Sequence[Mapping[str, object]], complete: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation with answers, and which of them the target would have had to produce.

    Every assistant turn is marked: its text and the token that ends it, not the template's opening of the turn nor what
    the template puts behind its end. Ids behind the last end are cut off, since no answer contains them.

    Args:
        tokenizer: a transformers tokenizer.
        messages: turns, the last one the assistant's.
        complete: False if the last answer was cut off by a length limit; its end token is then left out too.

    Returns:
        (ids, loss_mask), two lists of one length; the mask is 1 on answer tokens, 0 elsewhere.

    Raises:
        DataError: no assistant turn at the end, or a template under which the ids of a prompt are not a prefix of the
            ids of the conversation that continues it (then what is trained is not what decoding sees).
    """
    turns = check_messages(messages)
    if turns[-1]["role"] != "assistant":
        raise DataError("a conversation to train on must end with an assistant turn.")
    if not getattr(tokenizer, "chat_template", None):
        prompt = encode_chat(tokenizer, turns[:-1])
        answer = _encode_text(tokenizer, turns[-1]["content"])
        if complete and tokenizer.eos_token_id is not None:
            answer.append(tokenizer.eos_token_id)
        return prompt + answer, [0] * len(prompt) + [1] * len(answer)

    enders = special_ids(tokenizer)
    whole = _encode_text(tokenizer, _render(tokenizer, turns, False))
    mask = [0] * len(whole)
    end = 0
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt = encode_chat(tokenizer, turns[:number]) if number else []
        closed = (
            whole
            if number == len(turns) - 1
            else _encode_text(tokenizer, _render(tokenizer, turns[: number + 1], False))
        )
        for what, part in (("prompt before", prompt), ("conversation up to", closed)):
            if whole[: len(part)] != part:
                raise DataError(
                    f"chat template: the ids of the {what} assistant turn {number} are not a prefix of the whole "
                    "conversation's ids, so training would not see what decoding sees. Train on rows that carry "
                    "prompt_ids and response_ids (`fsd-train regenerate` writes them), or mend the template."
                )
        end = len(closed)
        while end > len(prompt) and closed[end - 1] not in enders:
            end -= 1
        if end == len(prompt):  # the template closes a turn without a special token
            end = len(closed)
        elif number == len(turns) - 1 and not complete:
            end -= 1
        mask[len(prompt) : end] = [1] * (end - len(prompt))
    return whole[:end], mask[:end]


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of the tokenizer's special tokens, named ones (bos, eos ...) and added ones (end of turn ...) alike."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _render(tokenizer: Any, turns: Sequence[Message], add_generation_prompt: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt))
    except TemplateError as error:  # templates refuse roles they do not know, or an order of turns
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(f"the chat template refuses a conversation of the roles {roles}: {error}") from error


def _encode_text(tokenizer: Any, text: str) -> list[int]:
    # the template has written the special tokens itself
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
