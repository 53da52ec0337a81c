"""Decoder layers of transformers without their model, as a draft head has them: which fit, and how they are built."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, DynamicCache
from transformers.utils import logging

from fsd_core.registry import is_whole
from fsd_infer.recurrent.mixers import recurrent_layers
from fsd_infer.targets.stack import mask_for, run_layers

LLAMA_LIKE = ("llama", "qwen3", "qwen2")  # layer types whose own rotary embedding knows no M-RoPE
LATENT = "deepseek_v3"  # layer type of heads with latent attention, without experts
EAGLE3_LAYERS = ("llama", "qwen3", LATENT)  # layer types of published EAGLE-3 heads
MROPE = ("mrope_section", "mrope_interleaved")  # rotary options of M-RoPE

# The config fields that a decoder layer depends on; all others keep the family's defaults.
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps"),
    *("max_position_embeddings", "rope_parameters"),
    *("attention_bias", "mlp_bias", "use_qkv_bias", "use_qk_norm", "qk_layernorm"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "attention_multiplier", "residual_multiplier"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_interleave"),
)


def llama_layer(config: Any, hidden_size: int) -> dict[str, Any]:
    """Return a Llama layer with a target's sizes, as :attr:`EagleConfig.layer`."""
    if getattr(config, "is_heterogeneous", False):  # Gemma-4 has heads of two widths: those of the first layer
        config = config.per_layer_config[0]
    heads = int(getattr(config, "num_attention_heads", None) or max(hidden_size // 64, 1))  # Mamba has none
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(getattr(config, "intermediate_size", None) or 4 * hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden_size // heads),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
        "max_position_embeddings": int(getattr(config, "max_position_embeddings", None) or 2048),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(theta)},
    }


def own_layer(config: Any) -> dict[str, Any] | None:
    """Return the target's own type of layer as a standalone config, or None if it does not work outside its model.

    Mixtures of experts give None, since a draft layer should be small.
    """
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        return None
    layer = layer_of(config)
    try:
        with torch.random.fork_rng(devices=[]):
            built = build_layers(layer, 1)
            _probe(*built, hidden_size=int(config.hidden_size))
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError, StrictDataclassError):
        return None  # the family's layer needs more than the common arguments
    return None if recurrent_layers(built[0]) else layer  # a draft layer keeps keys and values


def layer_of(config: Any) -> dict[str, Any]:
    """Return the fields of a transformers config that a decoder layer depends on, as :attr:`EagleConfig.layer`."""
    values = config.to_dict()
    layer = {name: values[name] for name in LAYER_FIELDS if values.get(name) is not None}
    layer |= {"q_lora_rank": None} if values.get("q_lora_rank", 0) is None else {}  # whole queries, not the default
    return {**layer, "model_type": config.model_type}


def build_layers(layer: dict[str, Any], count: int) -> tuple[nn.ModuleList, nn.Module, nn.Module]:
    """Build (decoder layers, rotary embedding, final norm) of a transformers model with ``count`` such layers."""
    rope = layer.get("rope_parameters") or {}
    multi = layer["model_type"] in LLAMA_LIKE and has_mrope(layer)
    plain = {name: value for name, value in rope.items() if name not in MROPE} if multi else rope
    config: Any = AutoConfig.for_model(**({**layer, "rope_parameters": plain} if plain else layer))
    config.num_hidden_layers = count
    config.vocab_size, config.pad_token_id = 2, None
    config.layer_types = ["full_attention"] * count
    config.sliding_window = None
    if layer["model_type"] == LATENT:
        config.first_k_dense_replace = count
    config._attn_implementation = "eager" if layer["model_type"] in ("gemma2", "gpt_oss") else "sdpa"
    model_class: Any = MODEL_MAPPING[type(config)]
    model = model_class(config)
    return model.layers, _multi_rotary(config, rope) if multi else model.rotary_emb, model.norm


def has_mrope(layer: Mapping[str, Any]) -> bool:
    """Whether a layer uses M-RoPE, so that its tokens have the target's positions after images."""
    return "mrope_section" in (layer.get("rope_parameters") or {})


def _multi_rotary(config: Any, rope: Mapping[str, Any]) -> nn.Module:
    """Return the rotary embedding of Llama-like layers with M-RoPE. Raises ValueError for wrong sections.

    The three positions of a token turn runs of a head's dimensions, as in Qwen2-VL, or every third, as in Qwen3-VL.
    """
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding  # loads slowly
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    section = rope["mrope_section"]
    if not isinstance(section, list) or len(section) != 3 or not all(is_whole(part, 0, width) for part in section):
        raise ValueError(f"mrope_section is {section!r:.60}, not three whole numbers")
    if 2 * sum(section) != width:
        raise ValueError(f"mrope_section {section} adds up to {sum(section)}, not to half of head_dim, {width // 2}")
    copied: Any = copy.deepcopy(config)
    copied.rope_parameters = {**config.rope_parameters, "mrope_section": section}
    return (Qwen3VLTextRotaryEmbedding if rope.get("mrope_interleaved") else Qwen2_5_VLRotaryEmbedding)(copied)


@torch.no_grad()
def _probe(layers: nn.ModuleList, rotary: nn.Module, norm: nn.Module, hidden_size: int) -> None:
    """Raise ValueError unless the layer is causal through an explicit mask and a cache."""
    x = torch.randn(1, 4, hidden_size)
    positions = torch.arange(4)[None]
    causal = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    forward = run_layers(layers, x, rotary(x, positions), positions, mask_for(layers, causal, x.dtype), None)
    cache = DynamicCache()
    steps = [
        run_layers(
            layers, x[:, i : i + 1], rotary(x, positions[:, i : i + 1]), positions[:, i : i + 1],
            mask_for(layers, causal[:, :, i : i + 1, : i + 1], x.dtype), cache,
        )
        for i in range(4)
    ]  # fmt: skip
    if forward.shape != x.shape or not torch.allclose(forward, torch.cat(steps, 1), atol=1e-4):
        raise ValueError("layer is not usable on its own")
    norm(forward)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars: a head has a dozen tensors."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
