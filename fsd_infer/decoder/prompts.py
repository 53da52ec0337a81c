"""Prompts in any form that ``FuzzyDecoder.generate`` takes, as token ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.registry import is_whole
from fsd_core.text.encoding import encode_chat, encode_text, need_tokenizer
from fsd_infer.decoder.config import FuzzyConfig
from fsd_infer.decoder.image_prompts import encode_with_images, per_prompt, prepared_image_input, shows_images
from fsd_infer.request.options import ARGUMENTS
from fsd_infer.targets.image_inputs import ImageInput
from fsd_infer.targets.target import Target

log = logging.getLogger(__name__)
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # which may be lists
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class PromptEncoder:
    """Encodes prompts for a target, and says once if it has no chat template."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._said_raw = False

    def encode_all(
        self, prompts: Any, padding: int | None, images: Any, apply_chat_template: bool | None
    ) -> tuple[list[list[int]], list[ImageInput | None]]:
        """Return each prompt's ids, and its images if it has any; arguments as of :meth:`.FuzzyDecoder.generate`."""
        given = listed(prompts, padding)
        shown = per_prompt(images, len(given))
        made: list[tuple[list[int], ImageInput | None]] = [
            encode_with_images(self.target, prompt, own, apply_chat_template)
            if own and not isinstance(own, ImageInput) or shows_images(prompt)
            else (self.encode(prompt, apply_chat_template), own or None)
            for prompt, own in zip(given, shown, strict=True)
        ]
        if isinstance(prompts, Mapping) and len(prompts) > 1:  # what a processor returns
            image_input = prepared_image_input(self.target, prompts, [ids for ids, _ in made])
            made = made if image_input is None else [(made[0][0], image_input)]
        return [ids for ids, _ in made], [image_input for _, image_input in made]

    def encode(self, prompt: Prompt, apply_chat_template: bool | None = None, images: Sequence[Any] = ()) -> list[int]:
        """See :meth:`.FuzzyDecoder.encode`."""
        if images or shows_images(prompt):
            return encode_with_images(self.target, prompt, images, apply_chat_template)[0]
        if isinstance(prompt, str):
            return self._encode_text(prompt, apply_chat_template)
        if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
            raise FsdError(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}.")
        items = list(prompt)
        if not items:
            raise FsdError("the prompt is empty: give at least one token.")
        if isinstance(items[0], Mapping):
            tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
            return encode_chat(tokenizer, items, blank=True)  # type: ignore[arg-type]
        size = self.target.vocab_size
        for token in items:
            if not is_whole(token, 0, size - 1):
                raise FsdError(
                    f"a prompt's token ids are whole numbers from 0 to {size - 1}, got {token!r}: "
                    "encode it with the target's own tokenizer."
                )
        return [int(token) for token in items]  # type: ignore[call-overload]

    def _encode_text(self, text: str, apply_chat_template: bool | None) -> list[int]:
        tokenizer = need_tokenizer(self.target.tokenizer, self.target.name)
        if not text:
            raise FsdError("the prompt is empty: give some text.")
        if apply_chat_template or (apply_chat_template is None and tokenizer.chat_template):
            return encode_chat(tokenizer, [{"role": "user", "content": text}], blank=True)
        if apply_chat_template is None and not self._said_raw:
            self._said_raw = True
            log.warning(
                "%s has no chat template: it continues prompts as they are (apply_chat_template=False, or --raw, if "
                "you mean that).",
                self.target.name,
            )
        ids = encode_text(tokenizer, text)
        if not ids:
            raise FsdError("the prompt encodes to no tokens: give some text.")
        return ids


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
    if items and (isinstance(items[0], Mapping) or not isinstance(items[0], (str, bytes, Iterable))):
        return [items]
    return items


def from_keywords(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into what a tokenizer or processor returned and the request's options.

    Raises FsdError: there are no ids among them.
    """
    if options.get("input_ids") is None:
        raise FsdError("there is no prompt: give text, messages, token ids or what a tokenizer returns.")
    known = vars(FuzzyConfig()).keys() | ARGUMENTS
    unknown = {name: value for name, value in options.items() if name not in known}
    inputs = {name: value for name, value in unknown.items() if name in _INPUTS or isinstance(value, Tensor)}
    return inputs, {name: value for name, value in options.items() if name not in inputs}


def _unpadded(ids: Any, mask: Any, padding: int | None) -> list[list[int]]:
    """Return the rows of ids [T] or [B, T], tensors or lists, where the mask is 1, or else the padding token is not."""
    rows, masks = (value.tolist() if hasattr(value, "tolist") else value for value in (ids, mask))
    if not rows or not isinstance(rows[0], list):
        rows, masks = [rows], None if masks is None else [masks]
    if masks is None:
        masks = [[token != padding for token in row] for row in rows]
    return [[token for token, kept in zip(row, of_row) if kept] for row, of_row in zip(rows, masks)]
