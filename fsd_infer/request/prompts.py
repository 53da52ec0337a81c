"""Prompts: whether they can be answered, and reading them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsd_core.errors import ContextLengthError, FsdError
from fsd_core.functional import at_nodes
from fsd_core.tensors import to_device
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters.session import DraftSession
from fsd_infer.targets.image_inputs import ImageInput, ImagePrompt, read_with_images, set_offset
from fsd_infer.targets.prefixes import Prefix
from fsd_infer.targets.target import Target

PREFILL_CHUNK = 512


def check_prompts(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, limit: int | None = None
) -> list[int]:
    """Return how many tokens may follow each prompt: max_new_tokens, or fewer if the context ends earlier.

    Args:
        target: target of the request.
        prompts: token ids.
        max_new_tokens: most tokens per answer.
        limit: for beams, the length at which the target's angles change; None: its context.

    Raises:
        FsdError: an empty prompt, a token id outside the target's vocabulary, or max_new_tokens below 1.
        ContextLengthError: a prompt that leaves no room in the target's context.
    """
    if max_new_tokens < 1:
        raise FsdError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    context = target.max_positions
    if limit is not None and max(map(len, prompts)) + max_new_tokens > limit:
        warnings.warn(
            f"beams of {target.name} end where text and answer have {limit} tokens, because its angles change beyond. "
            "Answers without beams go on.",
            stacklevel=2,
        )
    limit = context if limit is None else limit
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise FsdError(f"prompt {row} is empty: give at least one token.")
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            most, size = target.vocab_size - 1, len(target.tokenizer or ())
            fault = "encode it with the target's own tokenizer"
            if size > max(prompt) > most:
                fault = f"its tokenizer has {size} tokens: resize the model's embeddings, and train the new ones"
            raise FsdError(
                f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}, but {target.name} knows 0 to {most}: "
                f"{fault}."
            )
        if limit is not None and len(prompt) >= limit:
            raise ContextLengthError(
                f"a prompt has {len(prompt)} tokens, but {target.name} has a context of {limit} tokens, "
                "and an answer needs room too: shorten the prompt."
            )
    if limit is None:
        return [max_new_tokens] * len(prompts)
    return [min(max_new_tokens, limit - len(prompt)) for prompt in prompts]


def check_image_inputs(target: Target, image_inputs: Sequence[ImageInput | None] | None) -> None:
    """Raise FsdError for images in a text that this target may read a second time, without its images."""
    if target.recompute_length is not None and any(image_inputs or ()):
        raise FsdError(
            f"{target.name} reads a text again when it has {target.recompute_length} tokens (LongRoPE), which is not "
            "done with images: leave them out, or use another target."
        )


def prefill_prompts(
    target: Target,
    cache: SlotCache,
    tokens: Tensor,
    lengths: Tensor,
    prefixes: Sequence[Prefix | None] | None = None,
    prompt_images: Sequence[ImagePrompt | None] | None = None,
    on_chunk: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Fill the cache's first slots with prompts, slot = position.

    Args:
        target: the model that reads the prompts.
        cache: with a row per prompt.
        tokens: [B, M] ids of the prompts, right-padded, on the CPU.
        lengths: [B] lengths of the prompts in tokens, on the CPU.
        prefixes: per prompt a kept prefix that the target has read before, or None.
        prompt_images: as :func:`image_prompts` returns them.
        on_chunk: called after every chunk that was read, and between the layers that read images; its exceptions end
            the reading.

    Returns:
        Features [B, M, F], meaningless at padding, and logits [B, 1, V] at each prompt's last token.
    """
    prefixes, prompt_images = _per_row(prefixes, len(tokens)), _per_row(prompt_images, len(tokens))
    cache.prefilled = to_device(lengths, target.device)
    if target.places_images:
        cache.offsets = torch.zeros_like(cache.prefilled) if cache.offsets is None else cache.offsets.zero_()
    if any(prefixes) or any(prompt_images) or len(tokens) > 1 and target.reads_in_turn:
        prompts = [to_device(row[:length][None], target.device) for row, length in zip(tokens, lengths.tolist())]
        read = [
            _read_prompt(target, cache.row(row), prompt, prefixes[row], prompt_images[row], on_chunk)
            for row, prompt in enumerate(prompts)
        ]
        padded = [F.pad(features, (0, 0, 0, tokens.shape[1] - features.shape[1])) for features, _ in read]
        return torch.cat(padded), torch.cat([logits for _, logits in read])
    features, logits = prefill_text(
        target, cache, to_device(tokens, target.device), lengths=cache.prefilled, on_chunk=on_chunk
    )
    if int(lengths.min()) < tokens.shape[1]:  # the forward computed logits at the longest prompt's end only
        target.check_lm_head()
        last = at_nodes(features, to_device(lengths - 1, target.device)[:, None])
        logits = target.lm_logits(target.features_of(last))
    return features, logits


def image_prompts(
    target: Target, tokens: Tensor, lengths: Tensor, image_inputs: Sequence[ImageInput | None] | None
) -> list[ImagePrompt | None]:
    """Return the prompts [B, M] of these lengths [B] that have images, None for the others."""
    rows = zip(tokens, lengths.tolist(), _per_row(image_inputs, len(tokens)), strict=True)
    return [
        None if images is None else ImagePrompt(target.model, to_device(row[:count][None], target.device), images)
        for row, count, images in rows
    ]


def place_images(
    session: DraftSession, cache: SlotCache, tokens: Tensor, prompt_images: Sequence[ImagePrompt | None]
) -> None:
    """Give a drafter the rotary positions of prompts [B, M] with images (M-RoPE), before the prompts.

    Args:
        session: session of the drafter.
        cache: the target's, after :func:`prefill_prompts`.
        tokens: the prompts.
        prompt_images: those with images.
    """
    if cache.offsets is None or not any(prompt_images):
        return
    shifts = torch.zeros(3, *tokens.shape, dtype=torch.long, device=cache.offsets.device)
    for row, prompt in enumerate(prompt_images):
        if prompt is not None:
            count = prompt.tokens.shape[1]
            shifts[:, row, :count] = prompt.positions.view(-1, count) - torch.arange(count, device=shifts.device)
    session.set_rotary(shifts, cache.offsets)


def _per_row(values: Sequence[Any] | None, rows: int) -> list[Any]:
    """Return the values of the prompts, and None for the rows of a bucket beyond them."""
    return [*(values or []), *[None] * (rows - len(values or []))]


def _read_prompt(
    target: Target,
    cache: SlotCache,
    tokens: Tensor,
    prefix: Prefix | None,
    images: ImagePrompt | None,
    on_chunk: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """Read one prompt [1, T] with its images' pixels, unless a kept prefix has all of these."""
    if images is not None:
        if prefix is None or len(prefix.tokens) < images.image_input.ends(tokens[0].tolist()):
            return read_with_images(target, cache, images, on_chunk)
        set_offset(cache, images.positions)
    return prefill_text(target, cache, tokens, prefix, on_chunk=on_chunk)


def prefill_text(
    target: Target,
    cache: SlotCache,
    tokens: Tensor,
    prefix: Prefix | None = None,
    lengths: Tensor | None = None,
    on_chunk: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Read tokens [B, M] in chunks: (features [B, M, F], logits [B, 1, V] at the last token).

    ``prefix`` is a prefix of the tokens, for B = 1. Rows are padded beyond ``lengths`` [B].
    """
    features, first = [], 0
    if prefix is not None:
        cache.restore(prefix.states)
        features, first = [prefix.features[None]], len(prefix.tokens)
    for start in range(first, tokens.shape[1], PREFILL_CHUNK):
        chunk = tokens[:, start : start + PREFILL_CHUNK]
        slots = (start + torch.arange(chunk.shape[1], device=target.device)).expand_as(chunk)
        read_by_then = start + chunk.shape[1]
        cache.set_write_slots(slots, start, read_by_then)
        cache.recurrent.counts = None if lengths is None else (lengths - start).clamp(0, chunk.shape[1])
        visible = torch.arange(read_by_then, device=target.device) <= slots[..., None]
        logits, read = target.forward(chunk, slots, visible, cache, keep=1)
        features.append(read)
        on_chunk()
    return torch.cat(features, 1), logits
