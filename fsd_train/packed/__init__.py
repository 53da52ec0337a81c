"""Packed rows: conversations side by side in one row, each attending to itself alone, in any transformers model."""

from fsd_train.packed.attention import packed_attention
from fsd_train.packed.masks import BLOCK, ChainMask, PackedMask, TextMask
from fsd_train.packed.reading import attending, read_packed, reads_packed_rows

__all__ = [
    "BLOCK", "ChainMask", "PackedMask", "TextMask", "attending", "packed_attention", "read_packed", "reads_packed_rows",
]  # fmt: skip
