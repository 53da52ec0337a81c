"""Tree attention for models whose layers :mod:`.stack` does not know: transformers calls it as an attention function.

Its own "sdpa" copies keys and values for every query head where there is a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fsd_infer.backends.cuda.attention import MAX_NEW, tree_attention

NAME = "fsd_tree"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend from [B, heads, M, D] to [B, key heads, S, D] under a mask [B, 1, M, S] bool; else, transformers' "sdpa".

    Returns:
        [B, M, heads, D], and None for the weights.
    """
    batch, _, count, width = query.shape
    if (
        attention_mask is None
        or attention_mask.dtype != torch.bool
        or count > MAX_NEW
        or width != value.shape[-1]
        or others.get("position_bias") is not None
        or torch.is_grad_enabled()
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    lengths = torch.zeros(batch, dtype=torch.long, device=query.device)
    visible_after = attention_mask[:, 0, :, : key.shape[2]].expand(batch, count, -1)
    scale = width**-0.5 if scaling is None else float(scaling)
    key, value = (x if x.stride() == key.stride() and x.stride(3) == 1 else x.contiguous() for x in (key, value))
    query = query.transpose(1, 2)
    query = query if query.stride(3) == 1 else query.contiguous()
    with torch.cuda.device_of(query):
        return tree_attention(query, key, value, lengths, visible_after, scale), None


def use(model: nn.Module) -> None:
    """Let the attention of a model with transformers' "sdpa" be :func:`attend`."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _switch(model, "sdpa", NAME)


def leave(model: nn.Module) -> None:
    """Undo :func:`use`."""
    _switch(model, NAME, "sdpa")


def _switch(model: nn.Module, before: str, after: str) -> None:
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_attn_implementation", None) == before:
            config._attn_implementation = after
