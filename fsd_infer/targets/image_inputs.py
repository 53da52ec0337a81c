"""Images in prompts. The forward over a prompt is the only one that sees pixels; after it, decoding is over text.

A processor of transformers puts placeholder tokens where an image stands, and makes the pixels. The whole prompt then
takes one forward, with the positions and the masks that ``generate`` would give it (some families attend in both
directions within an image). With M-RoPE an image takes fewer rotary positions than tokens, so those of later tokens
differ from their places in the text by an offset, which the KV cache keeps (:attr:`SlotCache.offsets`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from fsd_core.errors import FsdError
from fsd_core.tensors import to_device
from fsd_infer.device.cache import SlotCache, cache_argument
from fsd_infer.targets.stack import hooked

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")  # fields of configs
READS_BOTH_WAYS = ("paligemma",)  # families that read a prompt with an image so
OF_TEXT = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # inputs of the text's length


@dataclass(frozen=True, eq=False)
class ImageInput:
    """The images of one prompt.

    Attributes:
        inputs: arguments of the model's first forward by name: pixels, their grids, and types of tokens [1, P].
        placeholders: ids of the tokens that stand for images.
        text: the prompt's ids if the model reads all of it in both directions, so that no other prompt shares a start.
    """

    inputs: Mapping[str, Any]
    placeholders: frozenset[int]
    text: tuple[int, ...] = ()

    @cached_property
    def digest(self) -> int:
        """A negative number that identifies these images."""
        sha = hashlib.sha256(repr(self.text).encode())
        for name, value in sorted(self.inputs.items()):
            if name not in OF_TEXT:
                tensor = value.detach().cpu().contiguous() if isinstance(value, Tensor) else None
                what = repr(value) if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
                sha.update(f"{name}{what}".encode())
                sha.update(b"" if tensor is None else tensor.view(torch.uint8).numpy().tobytes())
        return -1 - int.from_bytes(sha.digest()[:7], "big")

    def prefix_key(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt with :attr:`digest` for its placeholders, so that no other image's prefix is equal."""
        return [self.digest if token in self.placeholders else token for token in prompt]

    def ends(self, prompt: Sequence[int]) -> int:
        """Return the number of tokens up to the last placeholder; what follows is text."""
        return max(index for index, token in enumerate(prompt) if token in self.placeholders) + 1


def placeholders_of(config: Any) -> frozenset[int]:
    """Return the ids of the tokens that stand for images, as the model's config names them."""
    ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return frozenset(token for token in ids if isinstance(token, int))


def image_input_of(name: str, config: Any, inputs: Mapping[str, Any], prompt: Sequence[int]) -> ImageInput | None:
    """Return what a processor's outputs show besides the prompt's tokens; None: only text.

    Args:
        name: the target's, for errors.
        config: the model's.
        inputs: what a processor returns for one prompt.
        prompt: its token ids.

    Raises:
        FsdError: pixels without tokens that stand for them, as for a target that takes no images.
    """
    others = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    if not any("pixel" in key or "image" in key for key in others):
        return None
    placeholders = placeholders_of(config)
    if not placeholders & set(prompt):
        raise FsdError(
            f"the prompt has images but no token of {name} that stands for one: it takes no images, reads images "
            "otherwise than as tokens of its prompt, or its chat template leaves them out. Use another target."
        )
    return ImageInput(others, placeholders, tuple(prompt) if config.model_type in READS_BOTH_WAYS else ())


def places_images(model: Any) -> bool:
    """Whether images move the positions of later tokens (M-RoPE), so that the model has positions of its own."""
    name = "_prepare_position_ids_for_generation"
    return getattr(type(model), name, None) is not getattr(GenerationMixin, name, None)


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images, where its target reads it.

    Attributes:
        model: the target's.
        tokens: [1, P] the prompt's ids, on its device.
        image_input: its images.
    """

    model: Any
    tokens: Tensor
    image_input: ImageInput

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The inputs on the tokens' device, pixels in the model's dtype."""

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = to_device(value, self.tokens.device)
            return value.to(self.model.dtype) if value.is_floating_point() else value

        return {name: moved(value) for name, value in self.image_input.inputs.items()}

    @cached_property
    def positions(self) -> Tensor:
        """The tokens' positions as ``generate`` prepares them: [1, P], or of M-RoPE [3, 1, P]."""
        inputs = {**self.inputs, "input_ids": self.tokens, "attention_mask": torch.ones_like(self.tokens)}
        positions: Tensor = self.model._prepare_position_ids_for_generation(self.tokens, inputs)
        has_text_row = positions.dim() == 3 and len(positions) == 4  # the first of four are positions in the text
        return positions[1:] if has_text_row else positions


def set_offset(cache: SlotCache, positions: Tensor) -> None:
    """Set in a cache of one row the rotary position less the index of tokens after a prompt.

    ``positions``: of the prompt, [3, 1, P] or [1, P].
    """
    if cache.offsets is not None:
        cache.offsets.copy_(positions[..., -1].max()[None] + 1 - positions.shape[-1])


def read_with_images(
    target: Any, cache: SlotCache, prompt: ImagePrompt, on_layer: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor]:
    """Read a prompt of P tokens with its images in one forward.

    Args:
        target: a :class:`~fsd_infer.targets.target.Target`.
        cache: cache of one row.
        prompt: with images.
        on_layer: called before every layer, also of what reads the images; its exceptions end the reading.

    Returns:
        Features [1, P, F] and logits [1, 1, V] at its last token.

    Raises:
        FsdError: the model reads more tokens than the prompt has, as families do that put images before it.
    """
    model, tokens, count = target.model, prompt.tokens, prompt.tokens.shape[1]
    cache.set_write_slots(torch.arange(count, device=tokens.device)[None], 0, count)
    inputs = {cache_argument(type(model)): cache, **prompt.inputs}
    inputs["logits_to_keep"] = target.plain_stack.kept(1, tokens.device)
    inputs = model.prepare_inputs_for_generation(
        tokens, attention_mask=None, position_ids=prompt.positions, use_cache=True, is_first_iteration=True, **inputs
    )
    if not target.plain_stack.takes_keep:
        del inputs["logits_to_keep"]
    layers = [layer for part in model.modules() if isinstance(part, nn.ModuleList) for layer in part]
    with (
        target.angles_of_texts(cache.prefilled),
        target.plain_stack.captured(target.captured_layers) as outputs,
        hooked(layers, lambda *_: on_layer(), before=True),
    ):
        logits = model(**inputs).logits[:, -1:]
    features: Tensor = target.joined(*outputs)
    if features.shape[1] != count:
        raise FsdError(f"{target.name} reads {features.shape[1]} tokens for a prompt of {count}: use another target.")
    set_offset(cache, prompt.positions)
    return features, logits
