"""Drafting a block of K tokens in one pass: what a head needs for it beside its layers.

A round's root is token r+1 of the text. The head reads the pair (embedding of token r+1, feature r) as always, and
after it K-1 *masks*: at position r+s the pair (m_s, feature r), m_s a learned embedding. All are causal, so the output
h_s at r+s stands for token r+s+2 and knows the text, its place in the block and nothing of the drafts in between, as
in P-EAGLE (arXiv 2602.01469). What a path has drafted so far enters afterwards, by a recurrence without attention
(DSpark, arXiv 2607.05147, has a low-rank bias on logits in the token before; here it stands before the shared LM head,
so that it needs no table of the vocabulary, covers the ids of a text, and remembers the whole path):

    g_0 = h_0 ,    g_s = h_s + U · silu(V [h_s ; e_s ; g_{s-1}]) ,    e_s the embedding of the token before.

One pass of the layers then scores every path of a tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fsd_infer.heads.config import EagleConfig


class Block(nn.Module):
    """The masks m_1 … m_{K-1} and the path's term; both start by adding nothing to what the head says.

    Args:
        config: the head's.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.masks = nn.Parameter(torch.zeros(config.block_size - 1, config.embed_size))
        self.read = nn.Linear(2 * config.hidden_size + config.embed_size, config.markov_rank, bias=False)
        self.write = nn.Linear(config.markov_rank, config.hidden_size, bias=False)
        nn.init.zeros_(self.write.weight)

    def forward(self, outputs: Tensor, embeds: Tensor, before: Tensor) -> Tensor:
        """g_s [..., H] of outputs h_s [..., H], after tokens with embeds [..., E] and g_{s-1} [..., H]."""
        read = self.read(torch.cat([outputs, embeds.to(outputs.dtype), before], dim=-1))
        return outputs + self.write(nn.functional.silu(read))
