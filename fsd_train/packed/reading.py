"""The forward of a transformers model over a packed sequence, or over padded ones if it cannot read packed ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fsd_infer.recurrent.mixers import recurrent_layers
from fsd_train.packed.attention import NAME
from fsd_train.packed.masks import TextMask

log = logging.getLogger(__name__)

TOLERANCE = 0.12  # relative; rounding in bf16 stays below 0.05, a token of another conversation changes more than 0.5
_VERDICT = "_fsd_reads_packed_rows"  # attribute of a model


@contextmanager
def use_packed_attention(model: nn.Module) -> Iterator[None]:
    """Let a model's layers attend by :func:`packed_attention` within the context."""
    found: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "_attn_implementation")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, kind in before:
            config._attn_implementation = kind


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
    order = sorted(range(len(texts)), key=lengths.__getitem__)
    found: dict[int, Tensor] = {}
    while order:
        longest = lengths[order[-1]]
        count = max(1, ids.shape[1] // longest)
        chosen, order = order[-count:], order[:-count]
        outputs = forward(pad_sequence([texts[place] for place in chosen], batch_first=True))
        found |= {place: out[: lengths[place]] for place, out in zip(chosen, outputs, strict=True)}
    return torch.cat([found[place] for place in range(len(texts))])[None]


@torch.no_grad()
def supports_packing(forward: Callable[..., Tensor], model: nn.Module) -> bool:
    """Return whether a packed sequence gives a model's outputs of its conversations; found by trial, logged if not."""
    if _VERDICT not in vars(model):
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
        vars(model)[_VERDICT] = alike
        if not alike:
            name = type(model).__name__
            log.warning("%s cannot read packed sequences. It reads padded ones, which take longer.", name)
    return bool(vars(model)[_VERDICT])


def _usual_ids(model: Any, count: int) -> Tensor:
    """Return ids from the middle of the vocabulary. At its ends are special tokens and bytes that training rarely saw:
    some models enlarge rounding with them a hundredfold, or give every context the same features."""
    size = int(model.config.get_text_config().vocab_size)
    return torch.linspace(size / 4, size / 2, count).long()


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a token: a mean over dimensions, each by its own scale and at most 1.

    So a dimension of huge values, as many models have, hides no errors in others.
    """
    scale = expected.abs().mean(dim=(0, 1)).clamp_min(torch.finfo(expected.dtype).tiny)
    return float(((found - expected).abs() / scale).clamp_max(1.0).mean(-1).max())
