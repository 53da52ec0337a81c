"""Padding of token ids for transformers' ``generate``, and the special ids in its configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fsd_core.errors import FsdError
from fsd_core.registry import is_whole
from fsd_core.tensors import as_python, to_device


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> list[list[int]]:
    """Pad rows on the left to one length."""
    longest = max(len(row) for row in rows)
    return [[pad] * (longest - len(row)) + list(row) for row in rows]


def left_pad(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask [B, T] of left-padded rows on a device."""
    tokens, mask = left_padded(rows, pad), left_padded([[1] * len(row) for row in rows], 0)
    return to_device(torch.tensor(tokens), device), to_device(torch.tensor(mask), device)


def pad_id(config: GenerationConfig) -> int:
    """Return the config's padding token, else its first EOS token, else 0. Raises as :func:`eos_ids`."""
    named = [*id_list("pad_token_id", config.pad_token_id), *id_list("eos_token_id", config.eos_token_id)]
    return named[0] if named else 0


def eos_ids(config: GenerationConfig | None) -> set[int]:
    """Return the EOS tokens; none without a config. Raises FsdError if they are not whole numbers."""
    return set() if config is None else set(id_list("eos_token_id", config.eos_token_id))


def id_list(name: str, value: Any) -> list[int]:
    """Return a list for one id, several, or None. Raises FsdError if they are not whole numbers."""
    ids = as_python(value)
    ids = list(ids) if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]
    if not all(map(is_whole, ids)):
        raise FsdError(f"{name} of the generation config must be a token id, or a list of them, got {value!r:.60}.")
    return [int(one) for one in ids]
