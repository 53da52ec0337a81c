"""Lists of token ids as transformers' ``generate`` wants them, and what its configs say about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig


def left_pad(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T] of rows of any lengths, padded on the left."""
    longest = max(len(row) for row in rows)
    tokens = [[pad] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def pad_id(config: GenerationConfig) -> int:
    """The token that pads: the config's own, else the first that ends an answer, else 0."""
    for value in (config.pad_token_id, config.eos_token_id):
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            return int(value)
    return 0


def eos_ids(config: GenerationConfig | None) -> set[int]:
    """The tokens that end an answer; none without a config."""
    named = None if config is None else config.eos_token_id
    return set() if named is None else set(named) if isinstance(named, (list, tuple)) else {int(named)}
