"""Positions of a text: how many a model has, and attention masks by layer type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fsd_core.errors import ModelLoadError
from fsd_infer.device.cache import ATTENDS, WITHOUT_KEYS, SlotCache
from fsd_infer.targets.rotary import rope_lengths

_READ = {"full_attention", "sliding_attention"}  # types of attention whose masks tell what a token sees
if hasattr(Cache, "update_indexer"):  # DeepSeek's sparse attention: it chooses from what the mask allows
    _READ.add("indexed_attention")


def max_positions(config: Any) -> int | None:
    """Return the longest text in tokens, or None if the config does not say, or the angles adapt to any length."""
    lengths = rope_lengths(config)
    if "dynamic" in lengths:
        return None
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return max(filter(None, (limit, lengths.get("longrope"))), default=None)


def fixed_positions(config: Any) -> int | None:
    """Return the longest text, in tokens, whose angles do not depend on its length; None as for :func:`max_positions`.

    Rows of training end there.
    """
    return min(filter(None, (max_positions(config), *rope_lengths(config).values())), default=None)


def layer_types(config: Any) -> list[str] | None:
    """Return the type of each layer, if the config says."""
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)  # hybrids


def layer_windows(config: Any) -> dict[str, int | None]:
    """Return the attention window by layer type (None: full). Raises ModelLoadError for other kinds of layers."""
    window = getattr(config, "sliding_window", None)
    if hasattr(config, "use_sliding_window") and not config.use_sliding_window:
        window = None
    types = layer_types(config)
    if types is None and "local" in getattr(config, "attention_layers", ()):
        types = ["local"]  # GPT-Neo, whose windows count slots, not positions
    if types is None:
        return {"all": _checked(window, config)}
    distinct = {ATTENDS.get(name, name) for name in types} - WITHOUT_KEYS or {"full_attention"}
    unknown = distinct - _READ
    if unknown:
        raise ModelLoadError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; verifying a token tree in "
            "one forward needs full or sliding-window attention. Use another target."
        )
    return {name: (_checked(window, config) if name == "sliding_attention" else None) for name in sorted(distinct)}


def _checked(window: int | None, config: Any) -> int | None:
    if window is not None and window < 2:  # at 1, transformers' cache keeps all tokens
        raise ModelLoadError(
            f"sliding_window in the config of {config.model_type} is {window}, so tokens would see no others: set it "
            "to null where there is no window."
        )
    return window


def windowed(visible: Tensor, positions: Tensor, cache: SlotCache, windows: dict[str, int | None]) -> dict[str, Tensor]:
    """[B, M, S] masks by layer type; windows count positions, which tree siblings share, not slots."""
    masks = {}
    for layer_type, window in windows.items():
        mask = visible
        if window is not None:
            at = cache.positions
            if at is None:
                counted = torch.arange(visible.shape[-1], device=visible.device).repeat(visible.shape[0], 1)
                at = counted.scatter(1, cache.slots, positions)  # slot and position of the text's tokens are equal
            mask = mask & (positions[:, :, None] - at[:, None, :] < window)
        masks[layer_type] = mask
    return masks
