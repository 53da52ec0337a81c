"""Packed sequences: conversations side by side, each attending to itself alone, in any transformers model."""

from fsd_train.packed.attention import packed_attention
from fsd_train.packed.images import Inputs, image_prompts, target_features
from fsd_train.packed.masks import BLOCK, ChainMask, PackedMask, SlotMask, TextMask
from fsd_train.packed.reading import forward_packed, supports_packing, use_packed_attention

__all__ = [
    "BLOCK", "ChainMask", "Inputs", "PackedMask", "SlotMask", "TextMask", "forward_packed", "image_prompts",
    "packed_attention", "supports_packing", "target_features", "use_packed_attention",
]  # fmt: skip
