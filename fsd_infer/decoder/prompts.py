"""Prompts in any form that ``FuzzyDecoder.generate`` takes, as token ids, and what their images are to the model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fsd_core.errors import FsdError, ModelLoadError, foreign_errors
from fsd_core.registry import did_you_mean, is_whole
from fsd_core.tensors import as_python
from fsd_core.text.encoding import encode_chat, encode_text, need_tokenizer
from fsd_infer.request.images import Sources, encode_marked, encode_shown, has_images, split_images
from fsd_infer.targets.image_inputs import ImageInput, image_input_of, placeholders_of
from fsd_infer.targets.processors import load_processor
from fsd_infer.targets.target import Target

log = logging.getLogger(__name__)
_FIELDS = ("prompt", "images")  # of a prompt that carries its images
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Mapping[str, Any]
Encoded = tuple[list[int], ImageInput | None]
_LOADING = threading.Lock()


class PromptEncoder:
    """Encodes prompts for a target, and says once if it has no chat template."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._said_raw = False

    def encode_all(
        self, prompts: Any, padding: int | None, apply_chat_template: bool | None
    ) -> tuple[list[list[int]], list[ImageInput | None]]:
        """Return each prompt's ids, and its images if it has any; arguments as for :meth:`.FuzzyDecoder.generate`."""
        encoded = [self.encode(prompt, apply_chat_template) for prompt in listed(prompts, padding)]
        if isinstance(prompts, Mapping) and "input_ids" in prompts:  # what a tokenizer or a processor returns
            image_input = prepared_image_input(self.target, prompts, [ids for ids, _ in encoded])
            encoded = encoded if image_input is None else [(encoded[0][0], image_input)]
        return [ids for ids, _ in encoded], [image_input for _, image_input in encoded]

    def encode(self, prompt: Prompt, apply_chat_template: bool | None = None) -> Encoded:
        """Return a prompt's ids, and its images if it has any; arguments as for :meth:`.FuzzyDecoder.encode`."""
        prompt, images = split_prompt(prompt)
        if isinstance(images, ImageInput):  # its placeholders are among the ids already
            return self._encode_unseen(prompt, apply_chat_template), images
        if images or isinstance(prompt, (list, tuple)) and has_images(prompt):
            return encode_with_images(self.target, prompt, images, apply_chat_template)
        return self._encode_unseen(prompt, apply_chat_template), None

    def _encode_unseen(self, prompt: Any, apply_chat_template: bool | None) -> list[int]:
        """Return the ids of a prompt without images of its own to read."""
        if isinstance(prompt, str):
            return self._encode_text(prompt, apply_chat_template)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise FsdError(
                "a prompt is text, a list of messages, a list of token ids, or one of these with its images, "
                f'{{"prompt": ..., "images": [...]}}, not {type(prompt).__name__}.'
            )
        items = list(_as_lists(prompt))
        if not items:
            raise FsdError("the prompt is empty: give at least one token.")
        if isinstance(items[0], Mapping):
            tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
            if not tokenizer.chat_template:
                self._say_raw()
            return encode_chat(tokenizer, items, blank=True)
        size = self.target.vocab_size
        for token in items:
            if not is_whole(token, 0, size - 1):
                raise FsdError(
                    f"a prompt's token ids are whole numbers from 0 to {size - 1}, got {token!r}: "
                    "encode it with the target's own tokenizer."
                )
        return [int(token) for token in items]

    def _encode_text(self, text: str, apply_chat_template: bool | None) -> list[int]:
        tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
        if not text:
            raise FsdError("the prompt is empty: give some text.")
        if apply_chat_template and not tokenizer.chat_template:
            raise FsdError(
                f"apply_chat_template: {self.target.name} has no chat template. Leave it out, or give tokenizer= one."
            )
        if apply_chat_template or (apply_chat_template is None and tokenizer.chat_template):
            return encode_chat(tokenizer, [{"role": "user", "content": text}], blank=True)
        if apply_chat_template is None:
            self._say_raw()
        ids = encode_text(tokenizer, text)
        if not ids:
            raise FsdError("the prompt encodes to no tokens: give some text.")
        return ids

    def _say_raw(self) -> None:
        if not self._said_raw:
            self._said_raw = True
            log.warning(
                "%s has no chat template: it continues prompts as they are (apply_chat_template=False, or --raw, if "
                "you mean that).",
                self.target.name,
            )


def listed(prompts: Any, padding: int | None) -> list[Any]:
    """Return a list of prompts, given one prompt or many, or ids with padding."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return _unpadded(prompts["input_ids"], prompts.get("attention_mask"), None)
    if isinstance(prompts, Tensor):
        if prompts.dim() not in (1, 2):
            raise FsdError(f"a tensor of prompts is [T] or [B, T], got {list(prompts.shape)}.")
        return _unpadded(prompts, None, padding)
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    first = items[0] if items else ""  # a prompt by itself, or a message or a token id of the only one
    is_prompt = "prompt" in first if isinstance(first, Mapping) else isinstance(first, Iterable)
    return items if is_prompt else [items]


def split_prompt(prompt: Any) -> tuple[Any, Sequence[Any] | ImageInput]:
    """Split a prompt that carries its images, {"prompt": ..., "images": ...}; others carry none.

    In place of images may be an :class:`ImageInput`, with the ids that :func:`encode_with_images` made with it.

    Raises FsdError for other fields.
    """
    if not isinstance(prompt, Mapping) or "prompt" not in prompt:
        return prompt, ()
    for name in prompt:
        if name not in _FIELDS:
            raise FsdError(f"a prompt has the fields prompt and images, not {name!r:.60}.{did_you_mean(name, _FIELDS)}")
    images = prompt.get("images")
    if images is None or isinstance(images, (list, tuple, ImageInput)):
        return prompt["prompt"], () if images is None else images
    return prompt["prompt"], [images]


def _as_lists(value: Any) -> Any:
    """Return tensors, arrays and tuples of numbers, and lists of them, as lists."""
    with foreign_errors(FsdError, "a tensor of token ids is dense and holds values, which this one does not ({why})."):
        value = as_python(value)
    if not isinstance(value, (list, tuple)):
        return value
    return [one if isinstance(one, int) else _as_lists(one) for one in value]


def _unpadded(ids: Any, mask: Any, padding: int | None) -> list[list[int]]:
    """Return the rows of ids [T] or [B, T], tensors or lists, where the mask is 1, or else the padding token is not."""
    rows, masks = map(_as_lists, (ids, mask))
    if not isinstance(rows, list):
        raise FsdError(f"input_ids are lists or a tensor of token ids, got {ids!r:.60}.")
    if not rows or not isinstance(rows[0], list):
        rows, masks = [rows], None if masks is None else [masks]
    if masks is None:
        masks = [[token != padding for token in row] for row in rows]
    if [len(row) for row in rows] != [len(row) if isinstance(row, list) else None for row in masks]:
        raise FsdError("attention_mask has another shape than input_ids: give both as a tokenizer returns them.")
    return [[token for token, kept in zip(row, row_mask) if kept] for row, row_mask in zip(rows, masks)]


def processor_of(target: Target) -> Any:
    """Return the target's processor, which is loaded with the first image.

    Raises ModelLoadError: it has none, or takes no images.
    """
    if not placeholders_of(target.model.config):
        raise ModelLoadError(f"{target.name} takes no images: leave them out, or use an image-text-to-text model.")
    with _LOADING:
        if target.processor is None:
            if target.source is None:
                raise ModelLoadError(f"{target.name} has no processor: give it as tokenizer=.")
            name, hub = target.source
            target.processor = load_processor(name, need_tokenizer(target.tokenizer, target.name), **hub)
        tokenizer, processor = target.tokenizer, target.processor
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = getattr(processor, "chat_template", None)
    return processor


def encode_with_images(
    target: Target,
    prompt: Any,
    images: Sequence[Any] = (),
    chat: bool | None = None,
    sources: Sources | None = None,
    options: Mapping[str, Any] | None = None,
) -> Encoded:
    """Return the ids of one prompt that shows images, and the images.

    Args:
        target: with a processor.
        prompt: text or messages, see :func:`fsd_infer.request.images.split_images`.
        images: in the order of the parts that name none.
        chat: for text; False: it has the processor's marks of images, and goes into no chat template.
        sources: where images may come from; None: any local file.
        options: further arguments of the chat template.

    Raises:
        FsdError: see :func:`.split_images` and :func:`.encode_shown`; ids in place of text.
        ModelLoadError: a target that takes no images, or has no processor.
    """
    processor, tokenizer, sources = processor_of(target), target.tokenizer, sources or Sources()
    if isinstance(prompt, str) and chat is False:
        ids, inputs = encode_marked(processor, prompt, [sources.open(image) for image in images])
    elif isinstance(prompt, str) or isinstance(prompt, Sequence) and all(isinstance(turn, Mapping) for turn in prompt):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids, inputs = encode_shown(processor, tokenizer, *split_images(turns, images, sources), options)
    else:
        raise FsdError("images go with text or messages, and this prompt is token ids.")
    return ids, image_input_of(target.name, target.model.config, inputs, ids)


def prepared_image_input(
    target: Target, inputs: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> ImageInput | None:
    """Return the images in what a processor returned, given as prompts. Raises FsdError for several prompts."""
    given = {name: value for name, value in inputs.items() if value is not None}
    ids = prompts[0] if len(prompts) == 1 else []
    if len(prompts) > 1:
        if set(given) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}:
            raise FsdError(
                "what a processor returns for several prompts does not say whose the images are: give the messages, or "
                "one prompt at a time."
            )
        return None
    image_input = image_input_of(target.name, target.model.config, given, ids)
    if image_input is not None and any(
        isinstance(value, Tensor) and name.endswith("token_type_ids") and value.shape[-1] != len(ids)
        for name, value in given.items()
    ):
        raise FsdError("the prompt with an image is padded: give it without padding.")
    return image_input
