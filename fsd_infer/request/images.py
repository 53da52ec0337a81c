"""Prompts with images: where images come from, and the ids and pixels that a processor makes of messages."""

from __future__ import annotations

import base64
import binascii
import copy
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from transformers import BatchEncoding

from fsd_core.errors import FsdError, shortened
from fsd_core.text.control import encode_hidden, encode_with_offsets, hidden
from fsd_core.text.conversations import check_messages
from fsd_core.text.encoding import render_turns
from fsd_core.text.image_rows import PARTS, source_of
from fsd_core.text.templates import turns_for

MAX_PIXELS = 1 << 26  # of an image, which a small file may hold

Encoded = tuple[list[int], dict[str, Any]]  # token ids, and what a processor returns for one prompt


@dataclass(frozen=True)
class Sources:
    """Where images may come from.

    Attributes:
        folders: directories whose files may be read; None: any file.
        most_bytes: of a file.
    """

    folders: tuple[Path, ...] | None = None
    most_bytes: int = 1 << 26

    def open(self, source: Any) -> Any:
        """Return an image: a PIL image or an array as it is, or that of a path, a file: or data: URL or bytes, in RGB.

        Raises:
            FsdError: a remote URL, a file outside the folders, or no image.
        """
        if isinstance(source, bytes):
            return _decoded(source, "the row")
        if not isinstance(source, (str, Path)):
            if hasattr(source, "mode") or hasattr(source, "shape"):
                return source
            raise FsdError(f"an image is a path, a data: URL or a PIL image, got {type(source).__name__}.")
        text = str(source)
        if text.startswith("data:"):
            return _decoded(_of_data_url(text), "the data: URL")
        kind = urlparse(text).scheme if "://" in text else ""
        if kind not in ("", "file"):
            raise FsdError(
                f"{text!r:.80} is a remote URL, and images are not fetched: give the file, or its bytes as a data: URL."
            )
        return self._read(Path(unquote(urlparse(text).path) if kind else text))

    def _read(self, path: Path) -> Any:
        try:
            whole = path.expanduser().resolve(strict=True)
            # whether a file exists outside the folders is not said
            seen = self.folders is None or any(whole.is_relative_to(folder.resolve()) for folder in self.folders)
            data = whole.read_bytes() if seen and whole.is_file() and whole.stat().st_size <= self.most_bytes else None
        except (OSError, RuntimeError, ValueError):
            data = None
        if data is None:
            where = "" if self.folders is None else " in the directories that this server may read"
            raise FsdError(f"there is no image {str(path)!r:.200} of at most {self.most_bytes >> 20} MiB{where}.")
        return _decoded(data, path.name)


def _of_data_url(text: str) -> bytes:
    head, comma, data = text.partition(",")
    if not comma or not head.endswith(";base64"):
        raise FsdError("an image's data: URL is data:image/TYPE;base64,DATA.")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FsdError(f"the image is not base64 ({error}).") from error


def _decoded(data: bytes, where: str) -> Any:
    """Return the image of a file's bytes, turned as its EXIF data says. Raises FsdError."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise FsdError("images need Pillow: pip install pillow.") from error
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise FsdError(f"the image of {where:.80} has more than {MAX_PIXELS} pixels: make it smaller.")
        return ImageOps.exif_transpose(image).convert("RGB")
    except FsdError:
        raise
    except Exception as error:  # decoders of damaged files raise many types
        raise FsdError(f"{where:.80} holds no image that can be read ({shortened(error, 80)}).") from error


@dataclass
class Shown:
    """Messages whose images are taken out.

    Attributes:
        turns: the messages, with parts of the type "image" alone where images were.
        images: in their order.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)


def has_images(messages: Iterable[Any]) -> bool:
    """Whether messages have parts that hold images."""
    return any(_kind(part) in PARTS for turn in messages for part in _parts(turn))


def show(messages: Sequence[Mapping[str, Any]], images: Sequence[Any], sources: Sources) -> Shown:
    """Take the images out of messages.

    Args:
        messages: turns, whose content is text or a list of parts, as transformers' chat templates or OpenAI's API have
            it: {"type": "text", "text": ...}, {"type": "image", "image" or "url" or "path" or "base64": ...} or
            {"type": "image_url", "image_url": {"url": ...}}.
        images: of the parts of the type "image" that name none, in their order; without such parts they come first in
            the last user turn.
        sources: where images may come from.

    Raises:
        FsdError: an image that cannot be read, another number of images than of parts that name none, or parts of
            another type.
    """
    found, left = Shown(), list(images)
    for turn in messages:
        parts: list[dict[str, Any]] = []
        for part in _parts(turn):
            if _kind(part) == "text":
                parts.append({"type": "text", "text": part.get("text")})
                continue
            if _kind(part) not in PARTS:
                raise FsdError(f"a part of the type {_kind(part)!r:.40}: parts are of the types text and image.")
            parts.append({"type": "image"})
            source = source_of(part)
            if source is None and not left:
                raise FsdError("more image parts that name no image than images: give one image for each.")
            found.images.append(sources.open(left.pop(0) if source is None else source))
        found.turns.append({**turn, "content": parts} if parts else dict(turn))
    if left:
        if any(_kind(part) in PARTS and source_of(part) is None for turn in messages for part in _parts(turn)):
            raise FsdError(f"{len(left)} images more than image parts that name none: give one image for each.")
        _put_first(found, [sources.open(image) for image in left])
    return found


def _put_first(found: Shown, images: list[Any]) -> None:
    """Put images before the content of the last user turn."""
    last = next(
        (place for place in reversed(range(len(found.turns))) if found.turns[place].get("role") == "user"), None
    )
    if last is None:
        raise FsdError("images need a user turn that shows them.")
    content = found.turns[last].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    before = sum(_kind(part) == "image" for turn in found.turns[:last] for part in _parts(turn))
    found.turns[last] = {**found.turns[last], "content": [{"type": "image"}] * len(images) + parts}
    found.images[before:before] = images


def _parts(turn: Any) -> Sequence[Any]:
    content = turn.get("content") if isinstance(turn, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def encode_shown(
    processor: Any, tokenizer: Any, shown: Shown, options: Mapping[str, Any] | None = None, where: str = "messages"
) -> Encoded:
    """Return the ids of a conversation with images, and what else the processor makes of it.

    Names of special tokens in messages are text, as in :func:`fsd_core.text.encoding.encode_chat`.

    Raises:
        DataError: no chat turns, or turns that the template rejects.
        FsdError: the processor rejects the images, or the template writes another number of them.
    """
    plain = [{**turn, "content": _text_of(turn)} for turn in shown.turns]
    checked = check_messages(plain, where, blank=True)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        if [turn["role"] for turn in checked] != ["user"]:
            raise FsdError("this tokenizer has no chat template. Give one user turn and nothing else.")
        marks = getattr(processor, "image_token", "<image>") * len(shown.images)
        return encode_marked(processor, marks + hidden(tokenizer, checked[0]["content"]), shown.images)
    turns = [
        {**turn, "content": list(given["content"])} if has_images([given]) else turn
        for turn, given in zip(turns_for(tokenizer, checked, options), shown.turns, strict=True)
    ]
    return encode_marked(processor, render_turns(tokenizer, turns, True, options), shown.images)


def _text_of(turn: Mapping[str, Any]) -> Any:
    """Return a turn's content as text, of which a turn of images alone has a blank."""
    parts = _parts(turn)
    texts = [part.get("text") for part in parts if _kind(part) == "text"]
    if not parts or not all(isinstance(text, str) for text in texts):
        return turn.get("content")
    return "".join(texts) or " "


def encode_marked(processor: Any, text: str, images: Sequence[Any]) -> Encoded:
    """Return the ids of a text with marks of images, and what else the processor makes of it. Raises FsdError."""
    return encode_expanded(processor, text, images)[1:]


def encode_expanded(processor: Any, text: str, images: Sequence[Any]) -> tuple[str, list[int], dict[str, Any]]:
    """Return a text with the tokens of images in place of their marks, and what :func:`encode_marked` returns."""
    reader = copy.copy(processor)
    reader.tokenizer = _Hidden(processor.tokenizer)
    try:
        made = reader(text=[text], images=[list(images)] if images else None, return_tensors="pt")
    except Exception as error:  # each family's processor checks in its own way
        raise FsdError(f"the processor rejects the prompt's {len(images)} images: {shortened(error)}") from error
    return reader.tokenizer.last, made["input_ids"][0].tolist(), dict(made)


class _Read(BatchEncoding):
    """Ids with the characters that each stands for, which some processors look up."""

    def __init__(self, data: dict[str, Any], spans: list[list[tuple[int, int]]]) -> None:
        super().__init__(data)
        self._spans = spans

    def char_to_token(self, batch_or_char_index: int, char_index: int | None = None) -> int | None:  # type: ignore[override]
        row, char = (0, batch_or_char_index) if char_index is None else (batch_or_char_index, char_index)
        return next((at for at, (start, end) in enumerate(self._spans[row]) if start <= char < end), None)


class _Hidden:
    """A tokenizer as processors call it, to which the escaped names of special tokens are text.

    ``last`` is the text it read last.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.last = tokenizer, ""

    def __call__(self, text: str | list[str], **options: Any) -> _Read:
        """Return ids and a mask of ones. Special tokens are added as processors do: unless the text begins with bos."""
        ids: list[list[int]] = []
        spans: list[list[tuple[int, int]]] = []
        bos = self._tokenizer.bos_token
        for each in [text] if isinstance(text, str) else text:
            self.last = each
            with_special = not (bos and each.startswith(bos))
            if getattr(self._tokenizer, "is_fast", False):
                row, places = encode_with_offsets(self._tokenizer, each, with_special)
            else:
                row, places = encode_hidden(self._tokenizer, each, with_special), []
            ids.append(row)
            spans.append(places)
        return _Read({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}, spans)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
