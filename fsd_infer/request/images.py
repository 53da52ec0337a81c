"""Prompts with images: where images come from, and the ids and pixels that a processor makes of messages."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from transformers import BatchEncoding

from fsd_core.errors import FsdError, foreign_errors
from fsd_core.text.control import encode_escaped, encode_with_offsets, escaped
from fsd_core.text.conversations import check_messages
from fsd_core.text.encoding import render_turns
from fsd_core.text.image_rows import is_image, parts_of, source_of
from fsd_core.text.templates import turns_for

MAX_PIXELS = 1 << 26  # of an image, which a small file may hold

Encoded = tuple[list[int], dict[str, Any]]  # token ids, and what a processor returns for one prompt


@dataclass(frozen=True)
class Sources:
    """Where images may come from.

    Attributes:
        folders: directories whose files may be read; None: any file.
        most_bytes: most bytes of a file.
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
        scheme = urlparse(text).scheme if "://" in text else ""
        if scheme not in ("", "file"):
            raise FsdError(
                f"{text!r:.80} is a remote URL, and images are not fetched: give the file, or its bytes as a data: URL."
            )
        return self._read(Path(unquote(urlparse(text).path) if scheme else text))

    def _read(self, path: Path) -> Any:
        try:
            file = path.expanduser().resolve(strict=True)
            # the error must not reveal whether a file outside the folders exists
            inside = self.folders is None or any(file.is_relative_to(folder.resolve()) for folder in self.folders)
            data = file.read_bytes() if inside and file.is_file() and file.stat().st_size <= self.most_bytes else None
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
    with foreign_errors(FsdError, "the image is not base64 ({why})."):
        return base64.b64decode(data, validate=True)


def _decoded(data: bytes, where: str) -> Any:
    """Return the image of a file's bytes, rotated as its EXIF data says. Raises FsdError."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise FsdError("images need Pillow: pip install pillow.") from error
    with foreign_errors(FsdError, f"{where:.80} holds no image that can be read ({{why}}).", most=80):
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise FsdError(f"the image of {where:.80} has more than {MAX_PIXELS} pixels: make it smaller.")
        return ImageOps.exif_transpose(image).convert("RGB")


def has_images(messages: Iterable[Any]) -> bool:
    """Whether messages have parts that hold images."""
    return any(is_image(part) for turn in messages for part in parts_of(turn))


def split_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any], sources: Sources
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Take the images out of messages.

    Args:
        messages: turns, whose content is text or a list of parts, as transformers' chat templates or OpenAI's API have
            it: {"type": "text", "text": ...}, {"type": "image", "image" or "url" or "path" or "base64": ...} or
            {"type": "image_url", "image_url": {"url": ...}}.
        images: images for the parts of the type "image" without a source, in their order; without such parts they
            are put at the beginning of the last user turn.
        sources: where images may come from.

    Returns:
        The turns, with bare parts of the type "image" where images were, and the images in their order.

    Raises:
        FsdError: an image that cannot be read, more or fewer images than image parts without a source, or a part of
            another type.
    """
    unnamed = sum(is_image(part) and source_of(part) is None for turn in messages for part in parts_of(turn))
    if images and not unnamed:
        messages, unnamed = _with_places(messages, len(images)), len(images)
    if unnamed > len(images):
        raise FsdError("more image parts that name no image than images: give one image for each.")
    if unnamed < len(images):
        raise FsdError(f"{len(images) - unnamed} images more than image parts that name none: give one image for each.")
    turns, opened, remaining = list[dict[str, Any]](), list[Any](), iter(images)
    for turn in messages:
        parts: list[dict[str, Any]] = []
        for part in parts_of(turn):
            if _kind(part) == "text":
                parts.append({"type": "text", "text": part.get("text")})
                continue
            if not is_image(part):
                raise FsdError(f"a part of the type {_kind(part)!r:.40}: parts are of the types text and image.")
            source = source_of(part)
            opened.append(sources.open(next(remaining) if source is None else source))
            parts.append({"type": "image"})
        turns.append({**turn, "content": parts} if parts else dict(turn))
    return turns, opened


def _with_places(messages: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return messages with image parts that name none before the content of the last user turn."""
    users = [index for index, turn in enumerate(messages) if turn.get("role") == "user"]
    if not users:
        raise FsdError("images need a user turn that shows them.")
    last = messages[users[-1]]
    parts = parts_of(last) or [{"type": "text", "text": last.get("content")}]
    shown = {**last, "content": [*[{"type": "image"}] * count, *parts]}
    return [*messages[: users[-1]], shown, *messages[users[-1] + 1 :]]


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def encode_shown(
    processor: Any,
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    images: Sequence[Any],
    options: Mapping[str, Any] | None = None,
) -> Encoded:
    """Return the ids of a conversation whose images :func:`split_images` took out, and the processor's other outputs.

    Names of special tokens in messages are text, as in :func:`fsd_core.text.encoding.encode_chat`.

    Raises:
        DataError: no chat turns, or turns that the template rejects.
        FsdError: the processor rejects the images, or the template writes another number of them.
    """
    plain = [{**turn, "content": _text_of(turn)} for turn in turns]
    checked = check_messages(plain, "messages", blank=True)
    if not getattr(tokenizer, "chat_template", None):
        if [turn["role"] for turn in checked] != ["user"]:
            raise FsdError("this tokenizer has no chat template. Give one user turn and nothing else.")
        marks = getattr(processor, "image_token", "<image>") * len(images)
        return encode_marked(processor, marks + escaped(tokenizer, checked[0]["content"]), images)
    templated = [
        {**turn, "content": list(message["content"])} if has_images([message]) else turn
        for turn, message in zip(turns_for(tokenizer, checked, options), turns, strict=True)
    ]
    return encode_marked(processor, render_turns(tokenizer, templated, True, options), images)


def _text_of(turn: Mapping[str, Any]) -> Any:
    """Return a turn's content as text; a blank for a turn with only images."""
    parts = parts_of(turn)
    texts = [part.get("text") for part in parts if _kind(part) == "text"]
    if not parts or not all(isinstance(text, str) for text in texts):
        return turn.get("content")
    return "".join(texts) or " "


def encode_marked(processor: Any, text: str, images: Sequence[Any]) -> Encoded:
    """Return the ids of a text with image marks, and the processor's other outputs. Raises FsdError."""
    return encode_expanded(processor, text, images)[1:]


def encode_expanded(processor: Any, text: str, images: Sequence[Any]) -> tuple[str, list[int], dict[str, Any]]:
    """Return a text with the tokens of images in place of their marks, and what :func:`encode_marked` returns."""
    reader = copy.copy(processor)
    reader.tokenizer = _EscapedTokenizer(processor.tokenizer)
    with foreign_errors(FsdError, f"the processor rejects the prompt's {len(images)} images: {{why}}"):
        encoded = reader(text=[text], images=[list(images)] if images else None, return_tensors="pt")
    return reader.tokenizer.last, encoded["input_ids"][0].tolist(), dict(encoded)


class _Read(BatchEncoding):
    """Ids with the characters that each stands for, which some processors look up."""

    def __init__(self, data: dict[str, Any], spans: list[list[tuple[int, int]]]) -> None:
        super().__init__(data)
        self._spans = spans

    def char_to_token(self, batch_or_char_index: int, char_index: int | None = None) -> int | None:  # type: ignore[override]
        row, char = (0, batch_or_char_index) if char_index is None else (batch_or_char_index, char_index)
        return next((at for at, (start, end) in enumerate(self._spans[row]) if start <= char < end), None)


class _EscapedTokenizer:
    """A tokenizer, as processors call it, that reads the escaped names of special tokens as text.

    ``last`` is the text it read last.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.last = tokenizer, ""

    def __call__(self, text: str | list[str], **options: Any) -> _Read:
        """Return ids and a mask of ones. Special tokens are added as processors do: unless the text begins with bos."""
        ids: list[list[int]] = []
        spans: list[list[tuple[int, int]]] = []
        bos = self._tokenizer.bos_token
        for part in [text] if isinstance(text, str) else text:
            self.last = part
            with_special = not (bos and part.startswith(bos))
            if getattr(self._tokenizer, "is_fast", False):
                row, row_spans = encode_with_offsets(self._tokenizer, part, with_special)
            else:
                row, row_spans = encode_escaped(self._tokenizer, part, with_special), []
            ids.append(row)
            spans.append(row_spans)
        return _Read({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}, spans)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
