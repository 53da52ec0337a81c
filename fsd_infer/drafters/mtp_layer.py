"""One multi-token-prediction layer, made of the blocks that its target's own decoder layers have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsd_core.errors import ModelLoadError
from fsd_infer.device.cache import cache_argument
from fsd_infer.heads.mtp_layouts import Layout
from fsd_infer.targets.stack import mask_for


class _PlainBlock(nn.Module):
    """LongCat's MTP layer: one attention and one dense MLP, while its decoder layers hold two of each and experts."""

    def __init__(self, layer: Any, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = type(layer.self_attn[0])(config, index)
        self.mlp = type(layer.mlps[0])(config)
        norms = (type(layer.input_layernorm[0])(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor, cache: Any = None, **others: Any) -> Tensor:
        others[cache_argument(type(self.self_attn))] = cache
        x = x + self.self_attn(self.input_layernorm(x), **others)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class _TwoBlocks(nn.ModuleList):
    """Nemotron-H's MTP layer: one block attends, the other is an MLP or experts; each has one norm."""

    def __init__(self, block_class: type[nn.Module], config: Any) -> None:
        types = list(config.layers_block_type)
        if len(types) != 2 or types.count("full_attention") != 1 or not {"moe", "mlp"} & set(types):
            raise ModelLoadError(
                f"the MTP layer consists of blocks {types}, and of one that attends and one of experts or an MLP alone "
                "it is read. Name another drafter."
            )
        super().__init__(block_class(config, index) for index in range(2))
        self.self_attn.layer_idx = 0  # index of its keys and values in the cache

    @property
    def self_attn(self) -> Any:
        return next(block.mixer for block in self if block.block_type == "full_attention")

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        for block in self:
            x = block(x, **others)
        return x


def _block_of(last: Any, config: Any, index: int) -> Any:
    if isinstance(getattr(last, "input_layernorm", None), nn.ModuleList):
        return _PlainBlock(last, config, index)
    return _TwoBlocks(type(last), config) if hasattr(last, "mixer") else type(last)(config, index)


def _norm_of(block: Any) -> nn.Module:
    """Return one of a block's norms: before attention, or after it as in EXAONE 4."""
    norms = (getattr(block, name, None) for name in ("input_layernorm", "post_attention_layernorm"))
    return next((norm for norm in norms if norm is not None), None) or block[0].norm


class MtpLayer(nn.Module):
    """One MTP layer.

    Args:
        last: a decoder layer of the target's own.
        layout: layout of the family.
        config: config of the layer.
        index: index of its keys and values in a cache.
    """

    def __init__(self, last: Any, layout: Layout, config: Any, index: int) -> None:
        super().__init__()
        self.block, width = _block_of(last, config, index), config.hidden_size
        if layout.rotates and not self.block.self_attn.is_sliding:
            self.block.self_attn.sliding_window = None  # by which the target's own layers tell whether to rotate
        norm: Any = type(_norm_of(self.block))
        epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.enorm, self.hnorm = (norm(width, eps=epsilon) for _ in range(2))
        self.norm = norm(width, eps=epsilon) if layout.normed else nn.Identity()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.state_first = layout.state_first

    def forward(self, embeds: Tensor, states: Tensor, mask: Tensor, cache: Any, **angles: Any) -> Tensor:
        """Return g [B, M, H] of pairs of embeddings [B, M, H] and states [B, M, H]."""
        pair = [self.enorm(embeds.to(states.dtype)), self.hnorm(states)]
        x = self.eh_proj(torch.cat(pair[::-1] if self.state_first else pair, -1))
        part = self.block[0] if isinstance(self.block, _TwoBlocks) else self.block
        others: dict[str, Any] = {cache_argument(type(part)): cache, **angles}
        x = self.block(x, attention_mask=mask_for(nn.ModuleList([self.block]), mask, x.dtype), **others)
        result: Tensor = self.norm(x[0] if isinstance(x, tuple) else x)
        return result
