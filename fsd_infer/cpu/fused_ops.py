"""The usual decoder blocks in fewer operations, without touching modelling code.

A forward over a few tokens consists of many small operations, and starting them costs a CPU more than doing them.
:func:`fuse_layers` replaces, on the instance, the forwards of norms, gated MLPs and attentions whose computation is
known; a module of any other kind keeps its own, so every family works and the usual ones gain:

* RMS norm: a layer norm, which CPUs compute in one pass, of [x, -x] instead of eight passes;
* gated MLP: gate and up projection are one matrix product;
* attention: queries, keys and values come from one matrix product, rotary angles are applied to queries and keys at
  once, and keys and values are not copied for every query head that shares them: the heads of a group are laid side by
  side as further queries, whose mask is made once per forward;
* rotary embedding: cosines and sines looked up by position instead of computed;
* decoder layer: its parts called directly, or, in bf16 over few tokens, one call of our own kernels
  (:mod:`fsd_infer.cpu.layer`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsd_infer.cache import SlotCache
from fsd_infer.cpu.layer import KernelLayer
from fsd_infer.cpu.packing import (
    OncePerForward,
    Packed,
    Replacement,
    is_packable,
    is_replaced,
    own_memory,
    pack_linears,
    packed_in,
    releasable,
    share_embedding,
    through,
)

# Families whose modules compute what the replacements compute, by the prefix of transformers' class names.
_NORMS = ("Granite", "Llama", "Mistral", "Mixtral", "Olmo2", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe")
_MLPS = ("Cohere", "Granite", "Llama", "Mistral", "Olmo2", "Qwen2", "Qwen3", "Qwen3Moe", "StableLm")
_LAYERS = ("Llama", "Mistral", "Qwen2", "Qwen3")
_ROTARIES = ("Granite", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
_FIXED_ANGLES = ("default", "linear", "llama3", "yarn")  # that depend on nothing but the position
_ATTENTIONS = ("Granite", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")


def speed_up(module: nn.Module, release: bool = False, quantize: bool = False) -> None:
    """:func:`fuse_layers` and :func:`pack_linears` on a CPU; nothing elsewhere.

    With ``release`` the plain weights of packed layers are let go, layer by layer, so that memory holds them once
    (:func:`releasable` and :func:`share_embedding` say which). ``state_dict`` lacks their
    values until :func:`restore`. With ``quantize`` packed weights become fp8 (:meth:`Packed.quantize`).
    """
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        layers = releasable(module) if release else ()
        fuse_layers(module, layers)
        pack_linears(module, layers)
        if release:
            share_embedding(module)
        if quantize:
            quantize_packed(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            own_memory(module)


def quantize_packed(module: nn.Module) -> None:
    """:meth:`Packed.quantize` for every packed product in ``module``."""
    for packed in packed_in(module):
        packed.quantize()
    for part in module.modules():
        layer = vars(part).get("forward")
        if isinstance(layer, FusedLayer) and layer.kernel is not None:
            layer.kernel.find_weights()


def fuse_layers(module: nn.Module, release: Collection[nn.Module] = ()) -> int:
    """Replace the forwards of known norms, MLPs and attentions in ``module``; returns how many.

    Weights stay where they are (tied weights and ``state_dict`` are untouched) but those of packed layers in
    ``release``, which are let go. Results agree with the plain modules' within rounding.
    :func:`restore` undoes it.
    """
    once, kernel_once = OncePerForward(), OncePerForward()
    count = 0
    part: Any
    for part in module.modules():
        made: Replacement | None = None
        if is_replaced(part):
            continue
        if _is_known(part, _NORMS, "RMSNorm"):
            made = FusedNorm(part)
        elif _is_known(part, _MLPS, "MLP"):
            made = FusedMLP(part) if is_packable([part.gate_proj, part.up_proj]) else None  # else nothing to gain
        elif _is_known(part, _ATTENTIONS, "Attention") and part.config._attn_implementation == "sdpa":
            made = FusedAttention(part, once)
        elif _is_known(part, _ROTARIES, "RotaryEmbedding") and part.rope_type in _FIXED_ANGLES:
            made = FusedRotary(part)
        if made is not None:
            made.put_on(part)
            for packed in made.packed:
                packed.release(release)
            count += 1
    before: KernelLayer | None = None
    for part in module.modules():
        if _is_known(part, _LAYERS, "DecoderLayer") and is_replaced(part.self_attn) and not is_replaced(part):
            layer = FusedLayer(part, kernel_once, before)
            layer.put_on(part)
            before = layer.kernel
            count += 1
    return count


def _is_known(module: Any, families: tuple[str, ...], kind: str) -> bool:
    made_by_transformers = type(module).__module__.startswith("transformers.models.")
    return made_by_transformers and type(module).__name__ in {family + kind for family in families}


class FusedNorm(Replacement):
    """x / sqrt(mean(x²) + ε) · w over the last dimension.

    It is the first half of the layer norm of [x, -x], which has mean 0 and variance mean(x²). torch has a single
    kernel for layer norm on a CPU, while its RMS norm there is made of eight operations.
    """

    def __init__(self, norm: Any) -> None:
        weight = norm.weight.detach()
        self.epsilon, self.size, self.weight = norm.variance_epsilon, weight.shape[0], torch.cat((weight, weight))

    def __call__(self, x: Tensor) -> Tensor:
        pair = torch.layer_norm(torch.cat((x, -x), -1), self.weight.shape, self.weight, None, self.epsilon)
        return pair[..., : self.size].contiguous()


class FusedMLP(Replacement):
    """W_down (act(W_gate x) · W_up x), with W_gate and W_up packed as one."""

    def __init__(self, mlp: Any) -> None:
        self.project, self.down, self.act = Packed(mlp.gate_proj, mlp.up_proj), through(mlp.down_proj), mlp.act_fn
        self.packed = _packed(self.project, self.down)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.project(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class FusedRotary(Replacement):
    """Cosines and sines by position, from a table that the module itself fills and that grows with the text."""

    def __init__(self, rotary: Any) -> None:
        self.module = rotary
        self.tables: tuple[Tensor, Tensor] | None = None  # [positions, D] each

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """x of the data type that is wanted, position_ids [B, M] -> (cosine, sine) [B, M, D]."""
        needed = int(position_ids.max()) + 1
        if self.tables is None or self.tables[0].dtype != x.dtype or self.tables[0].shape[0] < needed:
            positions = torch.arange(max(512, 2 * needed), device=position_ids.device)
            cosine, sine = type(self.module).forward(self.module, x, positions[None])
            self.tables = cosine[0], sine[0]
        cosine, sine = self.tables
        return F.embedding(position_ids, cosine), F.embedding(position_ids, sine)


class FusedAttention(Replacement):
    """Attention over a :class:`SlotCache` through an explicit boolean mask. Any other call gets the module's own way.

    Args:
        attention: the module. Rotary angles cover whole heads, first half against second half.
        once: shared by the layers of one model.
    """

    def __init__(self, attention: Any, once: OncePerForward) -> None:
        self.module, self.once = attention, once
        self.width = int(attention.head_dim)
        self.key_heads = attention.k_proj.out_features // self.width
        self.query_heads = attention.q_proj.out_features // self.width
        self.group = self.query_heads // self.key_heads
        self.query_norm = getattr(attention, "q_norm", None)
        self.key_norm = getattr(attention, "k_norm", None)
        layers = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.project: Callable[[Tensor], Tensor] = Packed(*layers) if is_packable(layers) else self._in_turn
        self.output = through(attention.o_proj)
        self.packed = _packed(self.project, self.output)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [B, M, H], mask [B, 1, M, S] -> ([B, M, H], no attention weights)."""
        if (
            not isinstance(past_key_values, SlotCache)
            or position_embeddings is None
            or attention_mask is None
            or attention_mask.dtype != torch.bool
            or others.get("output_attentions")
        ):
            own = type(self.module).forward
            arguments = dict(
                position_embeddings=position_embeddings, attention_mask=attention_mask, past_key_values=past_key_values
            )
            return own(self.module, hidden_states, **arguments, **others)
        batch, count, _ = hidden_states.shape
        heads = self.project(hidden_states).view(batch, count, -1, self.width)
        source, kind = (position_embeddings[0], attention_mask), (self.group, heads.dtype)
        made = partial(_shared_by_layers, position_embeddings, attention_mask, *kind)
        cosine, sine, added = self.once.get(source, kind, made)
        queries, keys, values = heads.split_with_sizes((self.query_heads, self.key_heads, self.key_heads), 2)
        if self.query_norm is None or self.key_norm is None:
            both = _rotate(heads.narrow(2, 0, self.query_heads + self.key_heads), cosine, sine)
            queries, keys = both.split_with_sizes((self.query_heads, self.key_heads), 2)
        else:
            queries = _rotate(self.query_norm(queries), cosine, sine)
            keys = _rotate(self.key_norm(keys), cosine, sine)
        keys, values = past_key_values.update(keys.transpose(1, 2), values.transpose(1, 2), self.module.layer_idx)
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2).reshape(batch, self.key_heads, self.group * count, self.width),
            keys,
            values,
            attn_mask=added,
            scale=self.module.scaling,
        )
        out = out.view(batch, self.key_heads, self.group, count, self.width).permute(0, 3, 1, 2, 4)
        return self.output(out.reshape(batch, count, -1)), None

    def _in_turn(self, x: Tensor) -> Tensor:
        return torch.cat([self.module.q_proj(x), self.module.k_proj(x), self.module.v_proj(x)], dim=-1)


class FusedLayer(Replacement):
    """x + attention(norm(x)), then x + mlp(norm(x)), calling the parts directly while decoding.

    Attributes:
        kernel: the whole layer in one call, for forwards that it takes; None where it cannot be had.
    """

    def __init__(self, layer: Any, once: OncePerForward, before: KernelLayer | None = None) -> None:
        self.module, self.attention_module = layer, layer.self_attn
        parts = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
        self.first_norm, self.attention, self.second_norm, self.mlp = (vars(p).get("forward", p) for p in parts)
        norms = (self.first_norm, self.second_norm)
        self.kernel = KernelLayer.over(self.attention, self.mlp, norms, once, before)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        x = hidden_states
        if others or self.attention_module._forward_hooks or not isinstance(past_key_values, SlotCache):
            return type(self.module).forward(
                self.module, x, attention_mask, position_ids, past_key_values, use_cache, position_embeddings, **others
            )
        if self.kernel is not None and self.kernel.takes(x, attention_mask, position_embeddings):
            return self.kernel(x, attention_mask, past_key_values, position_embeddings)
        attended, _ = self.attention(
            self.first_norm(x),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        x = x + attended
        return x + self.mlp(self.second_norm(x))


def _packed(*products: Any) -> tuple[Packed, ...]:
    return tuple(product for product in products if isinstance(product, Packed))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x [B, M, heads, D] turned by angles [B, M, 1, D], the sine's first half negated."""
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)


def _shared_by_layers(
    embeddings: tuple[Tensor, Tensor], visible: Tensor, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Angles and mask as the layers of a forward use them.

    Args:
        embeddings: cosine and sine, [B, M, D] each.
        visible: [B, 1, M, S] bool.
        group: query heads per key head.
        dtype: of the scores' summand.

    Returns:
        (cosine [B, M, 1, D], sine [B, M, 1, D] with its first half negated, summand [B, 1, group · M, S]).
    """
    cosine, sine = embeddings
    low, high = sine.chunk(2, dim=-1)
    added = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    added = added.masked_fill_(~visible, torch.finfo(dtype).min).repeat(1, 1, group, 1)
    return cosine[:, :, None], torch.cat([-low, high], dim=-1)[:, :, None], added
