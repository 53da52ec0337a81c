"""Packed sequences: conversations side by side, each attending to itself alone, in any transformers model."""

from fsd_train.packed.attention import packed_attention
from fsd_train.packed.masks import BLOCK, ChainMask, PackedMask, SlotMask, TextMask
from fsd_train.packed.reading import (
    Inputs,
    forward_packed,
    supports_packing,
    target_features,
    text_mask,
    use_packed_attention,
)

__all__ = [
    "BLOCK", "ChainMask", "Inputs", "PackedMask", "SlotMask", "TextMask", "forward_packed", "packed_attention",
    "supports_packing", "target_features", "text_mask", "use_packed_attention",
]  # fmt: skip
