"""What corrects a block's estimates by the tokens drafted before: DSpark's Markov heads, DFlash2's selector, XPress."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from fsd_core.functional import NEVER
from fsd_infer.heads.block_config import BlockConfig


class MarkovHead(nn.Module):
    """DSpark's low-rank bias W2·g(W1[previous token]), [V, r] and [Vd, r].

    ``kind`` is "vanilla", where g is the identity, "gated" by the slot's state, or "rnn", which sees all tokens before.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.kind, rank, width = config.correction, config.rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, tokens: Tensor, slot: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias [..., Vd] and the next state [..., r]; arguments as for :meth:`read`."""
        previous, state = self.read(tokens, slot, state)
        return self.markov_w2(previous), state

    def read(self, tokens: Tensor, slot: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return g(W1[previous token]) and the next state, [..., r] each.

        Args:
            tokens: [...] previous tokens.
            slot: [..., H] the block's normed state.
            state: [..., r] of the "rnn", 0 at first.
        """
        previous = self.markov_w1(tokens)
        if self.kind == "gated":
            previous = torch.sigmoid(self.gate_proj(torch.cat([slot, previous], -1))) * previous
        elif self.kind == "rnn":
            gate, new, out = self.joint_proj(torch.cat([state, previous, slot], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, previous = gate * state + (1 - gate) * torch.tanh(new), torch.tanh(out)
        return previous, state


class CandidateSelector(nn.Module):
    """DFlash2's scores of a slot's likeliest tokens given the token before and the slot, Σ p[before]·(W h)·s[token]."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.count = config.candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.rank, bias=False)

    def forward(self, logits: Tensor, slot: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [..., V], NEVER of all but the candidates; arguments as for :meth:`BlockHead.corrected`."""
        likeliest, candidates = logits.topk(self.count)
        predecessors = self.predecessor_codebook[tokens] * self.hidden_projection(slot)
        scores = likeliest + (self.successor_codebook[candidates] * predecessors[..., None, :]).sum(-1)
        return torch.full_like(logits, NEVER).scatter(-1, candidates, scores)


class Refiner(nn.Module):
    """XPress's bias of a slot's logits, from the tokens before all slots of the block so far and the block's states.

    A node's state, [..., (1 + M)·r], is a summary of the block, and what was read at each of its slots, 0 if nothing.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, rank = config.hidden_size, config.rank
        self.rank = rank
        self.token_embed = nn.Embedding(config.vocab_size, rank)
        self.down_h, self.down_g = nn.Linear(width, rank, bias=False), nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.empty(rank, config.block_size, config.block_size))
        self.mlp_gate, self.mlp_up = (nn.Linear(rank, config.inner, bias=False) for _ in range(2))
        self.mlp_down = nn.Linear(config.inner, rank, bias=False)
        self.readout = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def begin(self, block: Tensor) -> Tensor:
        """Return the state [B, 1, (1 + M)·r] before the first slot of blocks [B, M, H]."""
        summary = self.down_g(block.mean(1, keepdim=True))
        return nn.functional.pad(summary, (0, block.shape[1] * self.rank))

    def forward(self, index: int, tokens: Tensor, slot: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias [..., Vd] of slot ``index`` and the next state; others as for :meth:`MarkovHead.read`."""
        at = (1 + index) * self.rank
        read = torch.cat([self.down_h(slot), state[..., : self.rank], self.token_embed(tokens)], -1)
        x = self.in_proj(read)
        state = torch.cat([state[..., :at], x, state[..., at + self.rank :]], -1)
        inputs = state[..., self.rank : at + self.rank].unflatten(-1, (-1, self.rank))  # up to this slot
        x = x + (inputs * self.mix_l[:, index, : index + 1].T).sum(-2)
        x = x + self.mlp_down(silu(self.mlp_gate(x)) * self.mlp_up(x))
        return self.readout(x), state
