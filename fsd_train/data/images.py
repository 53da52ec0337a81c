"""Rows with images: their token ids as decoding would have them, and the pixels when a batch is made.

The processor writes each image's tokens into the text of the chat template (:mod:`fsd_core.text.image_marks`). Each
image is read once when rows are read, which tells whether it can be read and how many tokens it takes, and again when
a batch needs its pixels.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import DataError, FsdError, ModelLoadError
from fsd_core.text.conversations import Message, check_messages
from fsd_core.text.encoding import encode_rendered, render
from fsd_core.text.image_marks import ImageTokens, mark_of, set_image_tokens, split_parts
from fsd_core.text.image_rows import has_row_images, take_images
from fsd_core.text.masks import encode_conversation
from fsd_core.text.rows import Example
from fsd_infer.decoder.prompts import processor_of
from fsd_infer.request.images import Sources, encode_expanded
from fsd_infer.targets.image_inputs import OF_TEXT, READS_BOTH_WAYS, ImageInput, placeholders_of
from fsd_infer.targets.loading import load_config
from fsd_infer.targets.processors import load_processor
from fsd_infer.targets.target import Target

_Options = Mapping[str, Any] | None
_Encoded = tuple[list[int], list[int], "SequenceImages"]
_Processed = tuple[str, list[int], dict[str, Any]]  # what encode_expanded returns
_PIXELS = "pixel"  # in the names of inputs that hold pixels


@dataclass(frozen=True, eq=False)
class SequenceImages:
    """The images of one sequence.

    Attributes:
        sources: paths, URLs, bytes of files, or PIL images.
        digests: digests of their pixels.
        positions: inputs of the target's first forward that determine positions, such as the images' grids.
        token_types: type of each token, by the input's name and the token; other tokens have type 0.
    """

    sources: tuple[Any, ...]
    digests: tuple[str, ...]
    positions: Mapping[str, Tensor]
    token_types: Mapping[str, Mapping[int, int]]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that identify these images."""
        return hashlib.sha256(" ".join(self.digests).encode()).hexdigest()[:16]

    def position_inputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Return the inputs that determine positions in a sequence of ids [M]; token types are [1, M]."""
        types = {name: torch.tensor([[of.get(token, 0) for token in ids]]) for name, of in self.token_types.items()}
        return {**self.positions, **types}


class ImageReader:
    """Encodes rows with images for a target.

    Args:
        name: name of the target, for errors.
        tokenizer: the target's; None: rows have token ids.
        load: returns the target's config, and a function that returns its processor.
    """

    def __init__(self, name: str, tokenizer: Any, load: Callable[[], tuple[Any, Callable[[], Any]]]) -> None:
        self.name, self.tokenizer, self._load = name, tokenizer, load

    @classmethod
    def of(cls, target: Target) -> ImageReader:
        """Return the reader of a loaded target."""
        return cls(target.name, target.tokenizer, lambda: (target.model.config, lambda: processor_of(target)))

    @classmethod
    def named(cls, name: str, tokenizer: Any) -> ImageReader:
        """Return the reader of a built-in name, directory or hub id."""
        return cls(name, tokenizer, lambda: (load_config(name), lambda: load_processor(name, tokenizer)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_load": None}  # data workers get what is loaded

    @cached_property
    def _loaded(self) -> tuple[Any, Callable[[], Any]]:
        try:
            return self._load()
        except FsdError:  # no config: a directory with a tokenizer alone
            return None, lambda: None

    @cached_property
    def placeholders(self) -> frozenset[int]:
        """Ids of the tokens that stand for images; none of a target that reads text alone."""
        return placeholders_of(self._loaded[0])

    @cached_property
    def processor(self) -> Any:
        """The target's processor. Raises ModelLoadError if it has none."""
        if self._loaded[0].model_type in READS_BOTH_WAYS:
            raise ModelLoadError(
                f"{self.name} reads a prompt with an image in both directions, so that a head cannot be trained on "
                "answers after it in one forward. Leave rows with images out, or use another target."
            )
        processor = copy.copy(self._loaded[1]())
        # rows without images are encoded as in decoding, where the processor's template is not known
        tokenizer = processor.tokenizer = copy.copy(processor.tokenizer)
        tokenizer.chat_template = tokenizer.chat_template or getattr(processor, "chat_template", None)
        return processor

    @cached_property
    def mark(self) -> str:
        """What the chat template writes of an image, for the processor to replace. Raises DataError if nothing."""
        processor, tokenizer = self.processor, copy.copy(self.processor.tokenizer)
        names = [getattr(processor, name, None) for name in ("image_token", "boi_token")]
        if not tokenizer.chat_template:
            raise DataError(f"{self.name} has no chat template, which rows with images need.")
        set_image_tokens(tokenizer, ImageTokens())
        text = render(tokenizer, [{"role": "user", "content": mark_of(0) + "?"}], False)
        mark = next((name for name in names if isinstance(name, str) and text.count(name) == 1), None)
        if mark is None:
            raise DataError(f"the chat template of {self.name} writes no image, or not as its processor reads one.")
        return mark

    def mark_images(self, row: Example) -> tuple[Example, list[Any]]:
        """Return a row with marks for its images, and the images.

        A row without images is returned as it is. So is any row of a target that reads text alone: what encodes the row
        refuses it. Raises DataError for malformed images.
        """
        if not has_row_images(row.values) or not self.placeholders:
            return row, []
        values, sources = take_images(row.values, row.folder)
        return row._replace(values=values), sources

    # encoding ------------------------------------------------------------------------------------------------------

    def conversation(
        self, turns: Sequence[Message], sources: Sequence[Any], complete: bool = True, options: _Options = None,
        max_length: int | None = None,
    ) -> list[_Encoded]:  # fmt: skip
        """Return the sequences of :func:`.encode_conversation` with the images of each.

        Raises:
            DataError: as there, or an image that cannot be read, or that no turn shows.
            ModelLoadError: the target has no processor.
        """
        images, tokenizer, processed = self._render(turns, sources, options)
        sequences = encode_conversation(tokenizer, turns, complete, options, max_length)
        return [(ids, mask, self._select(ids, images, sources, processed)) for ids, mask in sequences]

    def prompt(
        self, turns: Sequence[Message], sources: Sequence[Any], options: _Options = None
    ) -> tuple[list[int], SequenceImages]:
        """Return the ids of a prompt and its images; errors as of :meth:`conversation`."""
        images, tokenizer, processed = self._render(turns, sources, options)
        ids = encode_rendered(tokenizer, render(tokenizer, check_messages(turns), True, options))
        return ids, self._select(ids, images, sources, processed)

    def select(self, ids: Sequence[int], sources: Sequence[Any]) -> SequenceImages:
        """Return the images of a sequence of token ids, which has their placeholders. Raises DataError."""
        images = _open_images(sources)
        return self._select(ids, images, sources, self._processed(self.mark * len(images), images))

    def inputs(self, ids: Sequence[int] | Tensor, known: SequenceImages) -> dict[str, Tensor]:
        """Return the inputs of the target's first forward over a sequence [M]: pixels and what places tokens.

        Raises DataError if an image has changed since it was read first.
        """
        images = self._read_again(known)
        return _forward_inputs(self._processed(self.mark * len(images), images), known, ids)

    def image_input(self, ids: Sequence[int], known: SequenceImages) -> ImageInput | None:
        """Return the images among the tokens of a prompt, for decoding; None without any. Raises as :meth:`inputs`."""
        if not self._placeholders_in(ids):
            return None
        images = self._read_again(known)
        count, processed = self._present(ids, images, self._processed(self.mark * len(images), images))
        present = _sequence_images(processed, known.sources[:count], known.digests[:count])
        return ImageInput(_forward_inputs(processed, present, ids), self.placeholders)

    def _read_again(self, known: SequenceImages) -> list[Any]:
        """Return the images, opened. Raises DataError if one has changed since it was read first."""
        images = _open_images(known.sources)
        if tuple(map(_digest, images)) != known.digests:
            raise DataError(
                f"an image has changed since the rows were read: one of {_names(known.sources)}. Run again."
            )
        return images

    def _processed(self, text: str, images: Sequence[Any]) -> _Processed:
        try:
            return encode_expanded(self.processor, text, images)
        except FsdError as error:
            raise DataError(str(error)) from error

    def _render(
        self, turns: Sequence[Message], sources: Sequence[Any], options: _Options
    ) -> tuple[list[Any], Any, _Processed]:
        """Return the images in turns, a tokenizer that writes their tokens, and the processor's encoding of all turns.

        Raises DataError unless that tokenizer encodes the turns as the processor does.
        """
        parts = [part for turn in turns if turn["role"] == "user" for part in split_parts(turn["content"])]
        numbers = [part for part in parts if isinstance(part, int)]
        if not numbers or numbers != list(range(len(numbers))):
            raise DataError("the row has images, but none in the turns that are read. Show them in turns of the user.")
        images = _open_images(sources[: len(numbers)])
        mark, tokenizer = self.mark, copy.copy(self.processor.tokenizer)
        set_image_tokens(tokenizer, ImageTokens(mark))
        text = render(tokenizer, check_messages(turns), False, options)
        processed = self._processed(text, images)
        if text.count(mark) != len(images):
            raise DataError(f"the chat template writes {text.count(mark)} images of {len(images)}.")
        texts = _texts_between(text.split(mark), processed[0])
        bos = tokenizer.bos_token
        begins = bool(tokenizer("")["input_ids"]) and not (bos and text.startswith(bos))
        set_image_tokens(tokenizer, ImageTokens(mark, texts, begins and bool(getattr(tokenizer, "is_fast", False))))
        if encode_rendered(tokenizer, render(tokenizer, check_messages(turns), False, options)) != processed[1]:
            raise DataError(f"the processor of {self.name} encodes the conversation differently than its parts.")
        return images, tokenizer, processed

    def _select(
        self, ids: Sequence[int], images: Sequence[Any], sources: Sequence[Any], processed: _Processed
    ) -> SequenceImages:
        """Return the images whose placeholders are in a sequence. Raises DataError if the numbers differ."""
        count, processed = self._present(ids, images, processed)
        return _sequence_images(processed, sources[:count], list(map(_digest, images[:count])))

    def _present(self, ids: Sequence[int], images: Sequence[Any], processed: _Processed) -> tuple[int, _Processed]:
        """Return the number of images in a sequence, and the processor's encoding of these. Raises as `_select`."""
        expected = [token for token in ids if token in self.placeholders]
        count = len(images)
        if self._placeholders_in(processed[1]) != expected:  # cut before the last image, or ids of other images
            counts = [len(self._placeholders_in(self._processed(self.mark, [image])[1])) for image in images]
            count = next((n for n, total in enumerate(accumulate(counts), 1) if total == len(expected)), 0)
            processed = self._processed(self.mark * count, images[:count]) if count else processed
        if not count or self._placeholders_in(processed[1]) != expected:
            raise DataError(
                f"the row's ids have {len(expected)} tokens that stand for images, which its {len(images)} images do "
                "not take. Regenerate the answers with this target and these images."
            )
        return count, processed

    def _placeholders_in(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.placeholders]


def _forward_inputs(processed: _Processed, known: SequenceImages, ids: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """Return the inputs of a first forward over a sequence: the processor's, and those that determine positions."""
    others = {
        name: value for name, value in processed[2].items() if name not in (*OF_TEXT, "input_ids", "attention_mask")
    }
    return {**others, **known.position_inputs(list(map(int, ids)))}


def _sequence_images(processed: _Processed, sources: Sequence[Any], digests: Sequence[str]) -> SequenceImages:
    """Return the facts about images that the processor has read."""
    ids, values = processed[1], processed[2]
    positions = {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and _PIXELS not in name and name not in (*OF_TEXT, "input_ids", "attention_mask")
    }
    token_types = {
        name: {token: type_id for token, type_id in zip(ids, values[name][0].tolist()) if type_id}
        for name in OF_TEXT
        if name in values
    }
    return SequenceImages(tuple(sources), tuple(digests), positions, token_types)


def _open_images(sources: Sequence[Any]) -> list[Any]:
    """Return images in RGB. Raises DataError for one that cannot be read."""
    try:
        images = [Sources().open(source) for source in sources]
        return [image.convert("RGB") if getattr(image, "mode", "RGB") != "RGB" else image for image in images]
    except FsdError as error:
        raise DataError(str(error)) from error


def _texts_between(pieces: Sequence[str], text: str) -> list[str]:
    """Return the texts between ``pieces``, in their order, in a text. Raises DataError unless it has all of them.

    If a piece also occurs within the tokens of an image, the text is divided there instead, which changes no ids.
    """
    between, start = list[str](), len(pieces[0])
    for count, piece in enumerate(pieces[1:], start=2):
        is_last = count == len(pieces)
        end = len(text) - len(piece) if is_last else text.find(piece, start + bool(piece))
        if end < start or not text.startswith(pieces[0]) or not text.startswith(piece, end):
            raise DataError("the processor changes the conversation's text, not only its images.")
        between.append(text[start:end])
        start = end + len(piece)
    return between


def _digest(image: Any) -> str:
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:16]


def _names(sources: Sequence[Any]) -> str:
    return ", ".join(f"{source!s:.80}" if isinstance(source, str) else "an image in the row" for source in sources)
