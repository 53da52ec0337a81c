"""Images in the texts of rows: a mark of two private characters stands for each until the chat template writes it.

So conversations with images are read and encoded as text. A tokenizer that has :class:`ImageTokens` gives its template
a part of the type "image" for each mark, and what the template writes for it becomes the image's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsd_core.errors import DataError

_IMAGE, _PART, START, _FIRST = "\uf8fd", "\uf8fc", "\uf8fb", 0xF0000  # private characters: image, next part of text
MAX_IMAGES = 4096  # images of a row
_KEPT = "_fsd_image_tokens"  # attribute of tokenizers
_SPLIT = re.compile(f"({_IMAGE}.|{_PART})", re.DOTALL)
_Span = tuple[int, int]


def mark_of(number: int) -> str:
    """Return what stands for the image of this number in a text."""
    return _IMAGE + chr(_FIRST + number)


def joined_parts(parts: Sequence[str | int]) -> str:
    """Return the text of parts; those that are numbers are images."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        if index and isinstance(part, str) and isinstance(parts[index - 1], str):
            texts.append(_PART)
        texts.append(part if isinstance(part, str) else mark_of(part))
    return "".join(texts)


def split_parts(text: str) -> list[str | int]:
    """Return the parts of a text with marks; those that are numbers are images."""
    parts = [part for part in _SPLIT.split(text) if part and part != _PART]
    return [ord(part[1]) - _FIRST if part[0] == _IMAGE else part for part in parts]


def has_mark(text: str) -> bool:
    return _IMAGE in text


def check_unmarked(value: Any) -> None:
    """Raise DataError if a text within a row's value holds a character that marks images here."""
    if isinstance(value, str):
        for mark in (_IMAGE, _PART, START):
            if mark in value:
                raise DataError(
                    f"the text holds the private character U+{ord(mark):04X}, which marks images: remove it."
                )
    elif isinstance(value, Mapping):
        for item in value.values():
            check_unmarked(item)
    elif isinstance(value, list):
        for item in value:
            check_unmarked(item)


@dataclass(frozen=True)
class ImageTokens:
    """How a conversation's images are written.

    Attributes:
        mark: what the chat template writes of an image.
        texts: the tokens of each image by number, as text; None: not yet known, the mark stays.
        begins: whether texts begin with the tokenizer's special tokens, as a processor begins them.
    """

    mark: str = ""
    texts: Sequence[str] | None = None
    begins: bool = False


def set_image_tokens(tokenizer: Any, tokens: ImageTokens) -> None:
    """Let a tokenizer read the marks of images in the turns of users."""
    vars(tokenizer)[_KEPT] = tokens


def in_parts(tokenizer: Any, turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns in a template's form with a list of parts in place of each text with marks."""
    if vars(tokenizer).get(_KEPT) is None:
        return list(turns)
    return [{**turn, "content": _parts(turn["content"])} if _marked(turn) else turn for turn in turns]


def _text(turn: Mapping[str, Any]) -> str:
    """Return a turn's text, which a template's form may have as a part."""
    content = turn.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else ""


def _marked(turn: Mapping[str, Any]) -> bool:
    return turn["role"] == "user" and has_mark(_text(turn))


def _parts(content: Any) -> list[dict[str, Any]]:
    parts = split_parts(_text({"content": content}))
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]


def expanded(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], text: str, spans: Sequence[_Span] = ()
) -> tuple[str, list[_Span]]:
    """Return what a template wrote of turns with each image's tokens in place of its mark, and where spans moved.

    Raises DataError: the template wrote another number of images.
    """
    tokens: ImageTokens | None = vars(tokenizer).get(_KEPT)
    if tokens is None or tokens.texts is None:
        return text, list(spans)
    numbers = [part for turn in turns if _marked(turn) for part in split_parts(_text(turn)) if isinstance(part, int)]
    pieces = text.split(tokens.mark) if numbers else [text]
    if len(pieces) != len(numbers) + 1:
        raise DataError(f"the chat template writes {len(pieces) - 1} images of {len(numbers)}.")
    out = START if tokens.begins else ""
    moves, place = [(0, len(out))], 0  # from which character on a text moves, and by how many
    for piece, number in zip(pieces, [*numbers, None]):
        out, place = out + piece, place + len(piece)
        if number is not None:
            out, place = out + tokens.texts[number], place + len(tokens.mark)
            moves.append((place, len(out) - place))
    moved = [tuple(at + next(by for first, by in reversed(moves) if first <= at) for at in span) for span in spans]
    return out, moved  # type: ignore[return-value]


def begins_as_processors_do(tokenizer: Any, text: str) -> bool:
    """Whether :data:`START` begins a text, in whose place the tokenizer's special tokens belong."""
    return text.startswith(START) and vars(tokenizer).get(_KEPT) is not None
