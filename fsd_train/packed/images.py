"""The target's features of a packed sequence, some of whose conversations show images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_infer.request.prompts import prefill_prompts
from fsd_infer.targets.image_inputs import ImageInput, ImagePrompt, placeholders_of
from fsd_infer.targets.target import Target
from fsd_train.packed.masks import TextMask
from fsd_train.packed.reading import forward_packed

Inputs = Mapping[str, Any]  # of the target's forward by name, other than ids


def image_prompts(
    target: Target, ids: Tensor, lengths: Sequence[int], images: Mapping[int, Inputs]
) -> dict[int, ImagePrompt]:
    """Return the conversations with images by number, given ids [1, M], lengths, and the images' inputs by number."""
    texts, known = ids.split(list(lengths), dim=1), placeholders_of(target.model.config)
    return {number: ImagePrompt(target.model, texts[number], ImageInput(of, known)) for number, of in images.items()}


def features_with_images(target: Target, ids: Tensor, mask: TextMask) -> Tensor:
    """Return the target's features [1, M, F] of a packed sequence of ids [1, M].

    Conversations with images are read one by one as prompts in decoding, with a cache of keys and values; the others
    are packed. Raises DataError if the target's layers are sharded, because other ranks may have no images.
    """
    if target.is_sharded:
        raise DataError("rows with images need whole layers of the target. Set trainer.strategy to auto or ddp.")
    texts = ids.split(list(mask.lengths), dim=1)
    found = {number: _read(target, prompt) for number, prompt in mask.shown.items()}
    rest = [number for number in range(len(texts)) if number not in found]
    if rest:
        packed = TextMask(tuple(mask.lengths[number] for number in rest), mask.device)
        read = forward_packed(target.features, target.model, torch.cat([texts[n] for n in rest], 1), packed)
        found |= dict(zip(rest, read.split(list(packed.lengths), dim=1), strict=True))
    return torch.cat([found[number] for number in range(len(texts))], dim=1)


@torch.no_grad()
def _read(target: Target, prompt: ImagePrompt) -> Tensor:
    """Return the features [1, M, F] of a conversation with images, as decoding reads a prompt."""
    count = prompt.tokens.shape[1]
    cache = target.new_cache(1, count)
    return prefill_prompts(target, cache, prompt.tokens.cpu(), torch.tensor([count]), prompt_images=[prompt])[0]
