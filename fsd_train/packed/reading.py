"""The forward of a transformers model over a packed sequence, or over padded ones if it cannot read packed ones.

Conversations of the target that show images are read one by one (:func:`target_features`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fsd_core.errors import DataError
from fsd_infer.recurrent.mixers import recurrent_layers
from fsd_infer.request.prompts import prefill_prompts
from fsd_infer.targets.image_inputs import ImageInput, ImagePrompt, placeholders_of
from fsd_infer.targets.target import Target
from fsd_train.packed.attention import NAME
from fsd_train.packed.masks import TextMask

log = logging.getLogger(__name__)

TOLERANCE = 0.12  # relative; rounding in bf16 stays below 0.05, a token of another conversation changes more than 0.5
_SUPPORTED = "_fsd_reads_packed_rows"  # attribute of a model
Inputs = Mapping[str, Any]  # of the target's forward by name, other than ids


@contextmanager
def use_packed_attention(model: nn.Module) -> Iterator[None]:
    """Let a model's layers attend by :func:`packed_attention` within the context."""
    shared: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in shared if hasattr(config, "_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def forward_packed(forward: Callable[..., Tensor], model: nn.Module, ids: Tensor, mask: TextMask) -> Tensor:
    """Run a model over a packed sequence: in one forward, or over padded sequences if its attention takes no mask.

    Args:
        forward: runs ``model`` over ids [B, M], with more inputs of its forward; returns [B, M, X].
        model: a transformers model.
        ids: [1, M].
        mask: its mask.

    Returns:
        [1, M, X]
    """
    if supports_packing(forward, model):
        with use_packed_attention(model):
            return forward(ids, position_ids=mask.positions, packing=mask)
    return _forward_padded(forward, ids, mask.lengths)


def _forward_padded(forward: Callable[..., Tensor], ids: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run a model over a packed sequence's conversations, right-padded, in batches of no more tokens than it has."""
    texts = ids[0].split(list(lengths))
    by_length = sorted(range(len(texts)), key=lengths.__getitem__)
    outputs: dict[int, Tensor] = {}
    while by_length:
        count = max(1, ids.shape[1] // lengths[by_length[-1]])
        batch, by_length = by_length[-count:], by_length[:-count]
        padded = forward(pad_sequence([texts[number] for number in batch], batch_first=True))
        outputs |= {number: output[: lengths[number]] for number, output in zip(batch, padded, strict=True)}
    return torch.cat([outputs[number] for number in range(len(texts))])[None]


@torch.no_grad()
def supports_packing(forward: Callable[..., Tensor], model: nn.Module) -> bool:
    """Try whether a model computes the same for packed conversations as for separate ones; log if not."""
    if _SUPPORTED not in vars(model):
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        mask, ids = TextMask((3, 4), device), _usual_ids(model, 7).to(device)[None]
        try:
            with use_packed_attention(model):
                packed = forward(ids, position_ids=mask.positions, packing=mask)
            separate = torch.cat([forward(part) for part in ids.split([3, 4], dim=1)], dim=1)
            alike = packed.shape == separate.shape and _distance(packed, separate) < TOLERANCE
            alike = alike and not recurrent_layers(model)  # their states would run from one text into the next
        except (TypeError, ValueError, AssertionError, RuntimeError, AttributeError, KeyError):
            alike = False
        model.train(was_training)
        vars(model)[_SUPPORTED] = alike
        if not alike:
            name = type(model).__name__
            log.warning("%s cannot read packed sequences. It reads padded ones, which take longer.", name)
    return bool(vars(model)[_SUPPORTED])


def _usual_ids(model: Any, count: int) -> Tensor:
    """Return ids from the middle of the vocabulary. At its ends are special tokens and bytes that training rarely saw:
    some models enlarge rounding with them a hundredfold, or give every context the same features."""
    size = int(model.config.get_text_config().vocab_size)
    return torch.linspace(size / 4, size / 2, count).long()


def _distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a token: a mean over dimensions, each by its own scale and at most 1.

    So a dimension of huge values, as many models have, hides no errors in others.
    """
    scale = expected.abs().mean(dim=(0, 1)).clamp_min(torch.finfo(expected.dtype).tiny)
    return float(((actual - expected).abs() / scale).clamp_max(1.0).mean(-1).max())


def text_mask(
    target: Target, ids: Tensor, lengths: Sequence[int], images: Mapping[int, Inputs] | None = None
) -> TextMask:
    """Return the mask of a packed sequence of ids [1, M].

    Args:
        target: the target that will read it.
        ids: [1, M].
        lengths: tokens of each conversation.
        images: the images' inputs of the conversations with images, by number.
    """
    if not images:
        return TextMask(tuple(lengths), ids.device)
    texts, placeholders = ids.split(list(lengths), dim=1), placeholders_of(target.model.config)
    prompts = {
        number: ImagePrompt(target.model, texts[number], ImageInput(inputs, placeholders))
        for number, inputs in images.items()
    }
    return TextMask(tuple(lengths), ids.device, image_prompts=prompts)


def target_features(target: Target, ids: Tensor, mask: TextMask) -> Tensor:
    """Return the target's features [1, M, F] of a packed sequence of ids [1, M].

    Conversations with images are read one by one as prompts in decoding, with a cache of keys and values; the others
    are packed. Raises DataError if the target's layers are sharded, because other ranks may have no images.
    """
    if not mask.image_prompts:
        return forward_packed(target.features, target.model, ids, mask)
    if target.is_sharded:
        raise DataError("rows with images need whole layers of the target. Set trainer.strategy to auto or ddp.")
    texts = ids.split(list(mask.lengths), dim=1)
    features = {number: _read_prompt(target, prompt) for number, prompt in mask.image_prompts.items()}
    rest = [number for number in range(len(texts)) if number not in features]
    if rest:
        rest_mask = TextMask(tuple(mask.lengths[number] for number in rest), mask.device)
        rest_ids = torch.cat([texts[number] for number in rest], 1)
        packed = forward_packed(target.features, target.model, rest_ids, rest_mask)
        features |= dict(zip(rest, packed.split(list(rest_mask.lengths), dim=1), strict=True))
    return torch.cat([features[number] for number in range(len(texts))], dim=1)


@torch.no_grad()
def _read_prompt(target: Target, prompt: ImagePrompt) -> Tensor:
    """Return the features [1, M, F] of a conversation with images, as decoding reads a prompt."""
    count = prompt.tokens.shape[1]
    cache = target.new_cache(1, count)
    return prefill_prompts(target, cache, prompt.tokens.cpu(), torch.tensor([count]), prompt_images=[prompt])[0]
