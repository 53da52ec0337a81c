"""Take the images out of rows of data files: marks in the texts stand for them (:mod:`fsd_core.text.image_marks`)."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsd_core.errors import DataError
from fsd_core.text.conversations import IMAGES, TEXTS, Message, role_of
from fsd_core.text.image_marks import MAX_IMAGES, check_unmarked, has_mark, joined_parts, split_parts
from fsd_core.text.row_check import RowFields

_PARTS = ("image", "image_url")  # types of parts that hold an image
_SOURCES = ("image", "url", "path", "base64", "image_url")  # fields of such parts
_TALKS = ("messages", "conversations", "conversation", "prompt")  # fields that may hold turns
# LLaVA's mark in a text, with the line break that parts it from the question
_PLACE = re.compile(r"<image>\n|\n<image>\Z|<image>")


def source_of(part: Mapping[str, Any]) -> Any:
    """Return what a part of a message says of its image; None: nothing."""
    for name in _SOURCES:
        value = part.get(name)
        if value is not None:
            value = value.get("url") if isinstance(value, Mapping) and "url" in value else value
            return f"data:image/any;base64,{value}" if name == "base64" else value
    return None


def has_row_images(row: Mapping[str, Any]) -> bool:
    """Whether a row has images, in a column or as parts of its turns."""
    values = dict(row)  # so that looking does not count as reading
    talks = [turn for name in _TALKS for turn in _turns(values.get(name))]
    return any(values.get(name) for name in IMAGES) or any(is_image(part) for turn in talks for part in parts_of(turn))


def _turns(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def parts_of(turn: Any) -> Sequence[Any]:
    """Return the parts of an unchecked turn's content; none if that is only text."""
    return _turns(turn.get("content")) if isinstance(turn, Mapping) else ()


def is_image(part: Any) -> bool:
    """Whether an unchecked part of a turn holds an image."""
    return isinstance(part, Mapping) and part.get("type") in _PARTS


def take_images(row: Mapping[str, Any], folder: Path) -> tuple[RowFields, list[Any]]:
    """Return a row with marks in place of images, and the images: paths, URLs, bytes of files or PIL images.

    Images are parts of a user's turn, which name them or take the next one of the columns ``image`` or ``images``; or
    they stand where that turn's text has ``<image>``; or all come first in the first user turn.

    Args:
        row: as read.
        folder: where relative paths begin.

    Raises:
        DataError: more or fewer images than places for them, images in turns of others, or no turn of a user.
    """
    fields = RowFields(dict(row))
    if isinstance(row, RowFields):
        fields.seen = row.seen
    waiting = [source for name in IMAGES for source in _column(row.get(name))]
    check_unmarked(dict(row))
    fields.update(dict.fromkeys(IMAGES))
    images: list[Any] = []
    talk = next((name for name in _TALKS if isinstance(fields.get(name), list)), None)
    if talk is not None:
        fields[talk] = _marked_turns(fields[talk], waiting, images)
    else:
        field = next((name for name in TEXTS if isinstance(fields.get(name), str)), None)
        if field is None:
            raise DataError("images go with messages, conversations or the text of a prompt, and the row has none.")
        [turn] = _marked_turns([{"role": "user", "content": fields[field]}], waiting, images)
        fields[field] = turn["content"]
    if len(images) > MAX_IMAGES:
        raise DataError(f"the row has {len(images)} images. Give at most {MAX_IMAGES}.")
    return fields, [_placed(source, folder) for source in images]


def _column(value: Any) -> list[Any]:
    """Return the images of a column, which holds one or a list of them."""
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return [source for source in listed if source is not None and not (isinstance(source, str) and not source)]


def _placed(source: Any, folder: Path) -> Any:
    """Return where an image is, given a path relative to a folder, or the struct in which `datasets` keeps one."""
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if not isinstance(source, str) or source.startswith("data:") or "://" in source:
        return source
    return os.path.abspath(folder / Path(source).expanduser())


def _marked_turns(turns: Sequence[Any], waiting: list[Any], images: list[Any]) -> list[Any]:
    """Return turns with marks; images go from ``waiting`` and from parts to ``images``."""
    with_parts = any(is_image(part) for turn in turns for part in parts_of(turn))
    places = 0 if with_parts else sum(len(_PLACE.findall(_text_of(turn))) for turn in turns)
    if places and places != len(waiting):
        raise DataError(f"the texts have <image> {places} times, and the row has {len(waiting)} images.")
    result = []
    for number, turn in enumerate(turns):
        if any(is_image(part) for part in parts_of(turn)):
            if role_of(turn) != "user":
                raise DataError(f"turn {number} ({role_of(turn)}) has an image. Only turns of users show images.")
            turn = {**turn, "content": _marked_parts(turn["content"], waiting, images)}
        elif waiting and not with_parts and _text_of(turn):
            first = len(images)
            parts = _at_places(_text_of(turn), first) if places else [*range(len(waiting)), _text_of(turn)]
            images += [waiting.pop(0) for part in parts if isinstance(part, int)]
            turn = {**turn, "content" if turn.get("from") is None else "value": joined_parts(parts)}
        result.append(turn)
    if waiting:
        raise DataError(f"{len(waiting)} images more than places for them in the turns of users.")
    return result


def _text_of(turn: Any) -> str:
    """Return a user's text; "" of other turns."""
    if not isinstance(turn, Mapping) or role_of(turn) != "user":
        return ""
    content = turn.get("value" if turn.get("from") is not None else "content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    return content if isinstance(content, str) else ""


def _at_places(text: str, first: int) -> list[str | int]:
    """Return the parts of a text with numbers from ``first`` on where LLaVA's marks are."""
    pieces = _PLACE.split(text)
    parts: list[str | int] = [pieces[0]]
    for number, piece in enumerate(pieces[1:], start=first):
        parts += [number, piece]
    return [part for part in parts if part != ""]


def _marked_parts(content: Sequence[Any], waiting: list[Any], images: list[Any]) -> str:
    """Return the text of a content of texts and images."""
    parts: list[str | int] = []
    for part in content:
        if is_image(part):
            source = source_of(part)
            if source is None and not waiting:
                raise DataError("more image parts that name no image than images. Give one image for each.")
            parts.append(len(images))
            images.append(waiting.pop(0) if source is None else source)
        elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise DataError(f"a part of the type {kind!r:.40} with an image. Give texts and images.")
    return joined_parts(parts)


def with_images(messages: Sequence[Message], sources: Sequence[Any]) -> list[Any]:
    """Return turns with parts in place of marks, as rows that :func:`take_images` reads."""
    result: list[Any] = []
    for turn in messages:
        content: Any = turn["content"]
        if turn["role"] == "user" and has_mark(content):
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", **_named(sources[part])}
                for part in split_parts(content)
            ]
        result.append({**turn, "content": content})
    return result


def _named(source: Any) -> dict[str, str]:
    """Return the field of a part that names an image in JSON."""
    if isinstance(source, str):
        return {"url" if source.startswith("data:") or "://" in source else "path": source}
    if not isinstance(source, bytes):  # a PIL image
        file = io.BytesIO()
        source.save(file, "PNG")
        source = file.getvalue()
    return {"base64": base64.b64encode(source).decode()}
