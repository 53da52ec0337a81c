"""Block heads: DFlash (arXiv 2602.06036), and DSpark (2607.05147), Domino (2605.29707), DFlash2, XPress, correcting it.

One pass over a block of tokens, the root and masks, estimates the next tokens all at once. The target's features of the
text enter as keys and values of every layer. So the text needs no queries, and a round costs one pass over the block.
A correction then makes each estimate depend on the tokens drafted before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from fsd_infer.heads.block_config import BlockConfig
from fsd_infer.heads.corrections import CandidateSelector, MarkovHead, Refiner
from fsd_infer.heads.layers import build_layers


class BlockConvolution(nn.Module):
    """Convolutions over the slots of a block before and after a sublayer, with kernels that depend on its input."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def around(self, sublayer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the sublayer's output [B, M, H] for x [B, M, H], with both convolved."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, -1)
        before, after = (dynamic + self.base_kernel).unbind(2)  # [B, M, taps, H] each
        return self._convolved(sublayer(self._convolved(x, before)), after)

    def _convolved(self, x: Tensor, kernel: Tensor) -> Tensor:
        reached = nn.functional.pad(x, (0, 0, self.taps - 1, 0)).unfold(1, self.taps, 1)  # the own slot is last
        return (reached.flip(-1).transpose(2, 3) * kernel).sum(2)


class BlockHead(nn.Module):
    """The layers, the LM head if it is the head's own, and the correction.

    Parameters are named as in the published files. Domino's are ``prefix_gru`` and ``embed_proj``.

    Attributes:
        draft_ids: [Vd] target id of each row of its LM head, in training; None: all, or unknown.
    """

    draft_ids: Tensor | None

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        self.register_buffer("draft_ids", None)
        self.layers, self.rotary_emb, self.norm = build_layers(config.layer, config.num_layers)
        for part in self.layers:
            layer: Any = part
            if config.sinks:
                heads = layer.self_attn.config.num_attention_heads
                layer.self_attn.attention_sink_bias = nn.Parameter(torch.empty(heads))
            if config.taps:
                layer.attention_conv = BlockConvolution(width, config.taps, config.group)
                layer.mlp_conv = BlockConvolution(width, config.taps, config.group)
        self.fc = nn.Linear(len(config.layers) * config.target_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=self.norm.variance_epsilon)  # type: ignore[arg-type]
        vocabulary = config.draft_vocab_size or config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embeddings else None
        self.lm_head = nn.Linear(width, vocabulary, bias=False) if config.draft_vocab_size else None
        if config.correction == "domino":
            states = 3 * config.state_size
            self.prefix_gru = nn.ParameterDict(
                {"weight_ih_l0": torch.empty(states, width), "weight_hh_l0": torch.empty(states, config.state_size)}
            )
            inner, outer = width + config.state_size, vocabulary
            self.embed_proj = nn.Sequential(
                nn.Linear(inner, config.rank, bias=False), nn.SiLU(), nn.Linear(config.rank, outer, bias=False)
            )
        elif config.correction == "selector":
            self.candidate_selector = CandidateSelector(config)
        elif config.correction == "refiner":
            self.refiner_head = Refiner(config)
        elif config.correction is not None:
            self.markov_head = MarkovHead(config)
        if config.confidence is not None:
            read = width + (config.rank if config.confidence == "state+token" else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1)})

    @property
    def state_size(self) -> int:
        """Width of a node's state, which only recurrent corrections use."""
        if self.config.correction == "refiner":
            return (1 + self.config.block_size) * self.config.rank
        return self.config.state_size or (self.config.rank if self.config.correction == "rnn" else 0)

    def context(self, features: Tensor) -> Tensor:
        """Return what all layers read of the text: [..., H] of the target's features [..., m·H_t]."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, index: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [B, heads, M, width] of x [B, M, H] at positions [B, M]."""
        attention: Any = self.layers[index].self_attn
        keys = attention.k_norm(_heads(attention.k_proj(x), attention.head_dim)).transpose(1, 2)
        values = _heads(attention.v_proj(x), attention.head_dim).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, *self.rotary_emb(x, positions))[0], values

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        masks: Sequence[Any],
        update: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
        attend: Callable[[nn.Module, Tensor, Tensor, Tensor, Any], Tensor] | None = None,
    ) -> Tensor:
        """Estimate the states of a block.

        Args:
            embeds: [B, M, H] of the root and the masks.
            positions: [B, M].
            masks: the masks of each layer, [B, M, S] bool; whether slot i attends to cache slot s.
            update: given a layer's number and its keys and values of the block, returns those of text and block,
                [B, heads, S, width].
            attend: attends, given a layer's attention, queries, keys, values and mask: [B, M, heads, width]. None:
                torch's function, with masks as above.

        Returns:
            [B, M, H], the input of the LM head.
        """
        angles = self.rotary_emb(embeds, positions)

        def attended(x: Tensor, index: int) -> Tensor:
            attention: Any = self.layers[index].self_attn
            queries = attention.q_norm(_heads(attention.q_proj(x), attention.head_dim)).transpose(1, 2)
            queries = apply_rotary_pos_emb(queries, queries, *angles)[0]
            keys, values = update(index, *self.keys_values(index, x, positions))
            if self.config.sinks:
                mixed = _with_sinks(queries, keys, values, masks[index], attention.attention_sink_bias)
            elif attend is None:
                mixed = scaled_dot_product_attention(
                    queries, keys, values, attn_mask=masks[index][:, None], enable_gqa=queries.shape[1] != keys.shape[1]
                ).transpose(1, 2)
            else:
                mixed = attend(attention, queries, keys, values, masks[index])
            output: Tensor = attention.o_proj(mixed.flatten(2))
            return output

        x = embeds
        for index, part in enumerate(self.layers):
            layer: Any = part
            attention, mlp = partial(attended, index=index), layer.mlp
            if self.config.taps:
                attention = partial(layer.attention_conv.around, attention)
                mlp = partial(layer.mlp_conv.around, mlp)
            x = x + attention(layer.input_layernorm(x))
            x = x + mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def begin(self, block: Tensor, tokens: Tensor) -> Tensor:
        """Return the state [B, 1, state_size] before the roots, which follows from the idle slot where there is one.

        Args:
            block: [B, M, H] states of the slots.
            tokens: [B, 2], the one before the root and the root.
        """
        if self.config.correction == "refiner":
            state = self.refiner_head.begin(block)
            return self.refiner_head(0, tokens[:, :1], block[:, :1], state)[1] if self.config.fills_in else state
        state = block.new_zeros(len(block), 1, self.state_size)
        if self.config.fills_in and self.config.correction == "rnn":
            state = self.markov_head(tokens[:, 1:], block[:, :1], state)[1]
        return state

    def corrected(
        self, depth: int, logits: Tensor, slot: Tensor, tokens: Tensor, state: Tensor, embeds: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Correct the estimates of the tokens after nodes of one depth.

        Args:
            depth: depth of the nodes.
            logits: [B, E, Vd] uncorrected.
            slot: [B, E, H] the block's state that gave them.
            tokens: [B, E] of the nodes.
            state: [B, E, state_size] of their parents.
            embeds: [B, E, H] of the tokens, for Domino.

        Returns:
            [B, E, Vd] logits, and [B, E, state_size] states.
        """
        if self.config.correction is None:
            return logits, state
        if self.config.correction == "selector":
            return self.candidate_selector(logits, slot, tokens), state
        if self.config.correction == "refiner":
            bias, state = self.refiner_head(depth + self.config.fills_in, tokens, slot, state)
            return logits + bias, state
        if self.config.correction != "domino":
            bias, state = self.markov_head(tokens, slot, state)
            return logits + bias, state
        assert embeds is not None
        state = self._gru(embeds, state)
        if depth < self.config.plain_slots:
            return logits, state
        return logits + self.embed_proj(torch.cat([slot, state], -1)), state

    def _gru(self, inputs: Tensor, state: Tensor) -> Tensor:
        """One step of a GRU without biases; torch's own kernels cannot be recorded everywhere."""
        reset, update, new = nn.functional.linear(inputs, self.prefix_gru["weight_ih_l0"]).chunk(3, -1)
        old_reset, old_update, old_new = nn.functional.linear(state, self.prefix_gru["weight_hh_l0"]).chunk(3, -1)
        update = torch.sigmoid(update + old_update)
        new = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
        return (1 - update) * new + update * state

    def confidence(self, slot: Tensor, tokens: Tensor) -> Tensor:
        """Return the logit [B, E], fp32, of the probability that the draft after each node is accepted.

        Arguments as for :meth:`corrected`.
        """
        read = slot
        if self.config.confidence == "state+token":
            read = torch.cat([slot, self.markov_head.markov_w1(tokens)], -1)
        logits: Tensor = self.confidence_head["proj"](read)
        return logits[..., 0].float()


def _with_sinks(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """Attend [B, M, heads, width] with one more logit per head [heads], which takes weight and has no value.

    Queries are [B, heads, M, width], keys and values [B, groups, S, width], the mask [B, M, S].
    """
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = (queries @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5).masked_fill(~mask[:, None], -math.inf)
    sink = sinks[:, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
    weights = torch.cat([scores, sink], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return (weights.to(values.dtype) @ values).transpose(1, 2)


def _heads(x: Tensor, width: int) -> Tensor:
    return x.unflatten(-1, (-1, width))
