"""Prompts with images for :meth:`FuzzyDecoder.generate`: ids for the engine, and what the images are to the model."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fsd_core.errors import FsdError, ModelLoadError
from fsd_core.text.encoding import need_tokenizer
from fsd_infer.request.images import Sources, encode_marked, encode_shown, has_images, show
from fsd_infer.targets.image_inputs import ImageInput, image_input_of, placeholders_of
from fsd_infer.targets.processors import load_processor
from fsd_infer.targets.target import Target

Encoded = tuple[list[int], ImageInput | None]
_LOADING = threading.Lock()


def processor_of(target: Target) -> Any:
    """Return the target's processor, which is loaded when the first image comes.

    Raises ModelLoadError: it has none, or is no model that sees.
    """
    if not placeholders_of(target.model.config):
        raise ModelLoadError(f"{target.name} does not see: leave images out, or use an image-text-to-text model.")
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
        prompt: text or messages, see :func:`fsd_infer.request.images.show`.
        images: in the order of the parts that name none.
        chat: of text, False: it has the processor's marks of images, and goes into no chat template.
        sources: where images may come from; None: any local file.
        options: further arguments of the chat template.

    Raises:
        FsdError: see :func:`.show` and :func:`.encode_shown`; ids in place of text.
        ModelLoadError: a target that does not see, or has no processor.
    """
    processor, tokenizer, sources = processor_of(target), target.tokenizer, sources or Sources()
    if isinstance(prompt, str) and chat is False:
        ids, made = encode_marked(processor, prompt, [sources.open(image) for image in images])
    elif isinstance(prompt, str) or all(isinstance(turn, Mapping) for turn in prompt):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids, made = encode_shown(processor, tokenizer, show(turns, images, sources), options)
    else:
        raise FsdError("images go with text or messages, and these prompts are token ids.")
    return ids, image_input_of(target.name, target.model.config, made, ids)


def shows_images(prompt: Any) -> bool:
    """Whether a prompt is messages, some of which have images."""
    return isinstance(prompt, (list, tuple)) and has_images(prompt)


def per_prompt(images: Any, count: int) -> list[Any]:
    """Return each prompt's images, given one image, or a list of them for one prompt, or a list of lists.

    In place of a list may be a :class:`ImageInput`, for a prompt that :func:`encode_with_images` has encoded.

    Raises FsdError unless there is one list per prompt.
    """
    if images is None:
        return [()] * count
    if count == 1:
        given = list(images) if isinstance(images, (list, tuple)) else [images]
        nested = len(given) == 1 and isinstance(given[0], (list, tuple, ImageInput, type(None)))
        return [(given[0] or ()) if nested else given]
    if not isinstance(images, (list, tuple)) or len(images) != count:
        raise FsdError(f"{count} prompts: images is a list with each prompt's images, a list or None.")
    return [() if one is None else one if isinstance(one, (list, tuple, ImageInput)) else [one] for one in images]


def prepared_image_input(
    target: Target, inputs: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> ImageInput | None:
    """Return the images in what a processor returned, given as prompts. Raises FsdError for several prompts."""
    shown = {name: value for name, value in inputs.items() if value is not None}
    ids = prompts[0] if len(prompts) == 1 else []
    if len(prompts) > 1:
        if set(shown) - {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}:
            raise FsdError(
                "what a processor returns for several prompts does not say whose the images are: give the messages, or "
                "one prompt at a time."
            )
        return None
    image_input = image_input_of(target.name, target.model.config, shown, ids)
    if image_input is not None and any(
        isinstance(value, Tensor) and name.endswith("token_type_ids") and value.shape[-1] != len(ids)
        for name, value in shown.items()
    ):
        raise FsdError("the prompt with an image is padded: give it without padding.")
    return image_input
