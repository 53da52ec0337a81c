"""The config of a GGUF file's model, for the architectures that are read here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_infer.targets.gguf_families import FAMILIES, Family, family_of
from fsd_infer.targets.gguf_file import StoredTensor
from fsd_infer.targets.gguf_keys import KeyNumbers, architecture_keys, end_ids

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, in Llama 3
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SCALES_TENSORS = {"moe_intermediate_size": "ffn_gate_exps", "shared_expert_intermediate_size": "ffn_gate_shexp"}


def config_of(facts: dict[str, Any], tensors: dict[str, StoredTensor], source: Path) -> dict[str, Any]:
    """Return the arguments of the model's config.

    Raises:
        ModelLoadError: an architecture outside :data:`.FAMILIES`, or missing or invalid metadata.
    """
    family = family_of(facts)
    if family is None:
        known, found = ", ".join(FAMILIES), facts.get("general.architecture")
        raise ModelLoadError(f"{source} has architecture {found!r}. Only {known} can be expanded to a directory.")
    numbers, advice = KeyNumbers(architecture_keys(facts)), "Use another file of this model."
    with foreign_errors(ModelLoadError, f"{source}: its metadata are incomplete or invalid ({{why}}). {advice}"):
        config = _sizes(numbers, facts, family)
        config |= {"vocab_size": _rows(numbers, facts, tensors)}
        config |= {"tie_word_embeddings": "output.weight" not in tensors}
        layers = config["num_hidden_layers"]
        if layers > len(tensors):  # the model is built before its weights are compared
            raise ValueError(f"{layers} layers, but {len(tensors)} tensors")
        config["rope_parameters"] |= _scaling(numbers, tensors, config, family)
        if family.model_type == "ministral3":
            config["rope_parameters"] |= _temperature(numbers, config)
        config |= _more(numbers, tensors, config, family)
    return config


def _sizes(numbers: KeyNumbers, facts: dict[str, Any], family: Family) -> dict[str, Any]:
    hidden, heads = numbers.whole("embedding_length"), numbers.whole("attention.head_count")
    theta, ends = numbers.number("rope.freq_base", 10_000.0), end_ids(facts)
    width = numbers.whole("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        part = family.partial and name == "rope.dimension_count"
        if not (found := numbers.whole(name, width)) == width and not (part and found < width):
            raise ValueError(f"{name} is {numbers.values[name]}, but keys have {width} dimensions")
    groups = numbers.whole("attention.head_count_kv", heads)
    if width % 2 or heads % groups:
        raise ValueError(f"{heads} heads of {width} dimensions for {groups} heads of keys")
    eos = ends[0] if len(ends) == 1 else ends or None
    epsilon_key, epsilon = family.epsilon
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]],
        "model_type": family.model_type,
        "attention_dropout": 0.0,
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": width,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": numbers.whole("feed_forward_length", 1 if family.joins else None),
        "max_position_embeddings": numbers.whole("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": numbers.whole("block_count"),
        "num_key_value_heads": groups,
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id", ends[0] if ends else None),
        # GGUF stores the epsilon as fp32, in which 1e-05 reads 9.9999997e-06
        epsilon: float(f"{numbers.number(epsilon_key, most=0.01):.6g}"),
        # in both forms, for other readers of the directory, such as vLLM and older transformers
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "use_cache": True,
        **family.fixed,
    }


def _more(numbers: KeyNumbers, tensors: dict[str, StoredTensor], config: dict[str, Any], family: Family) -> Any:
    """Return what only some families have: biases, scales, sizes of experts, windows and partly rotated heads."""
    more: dict[str, Any] = {}
    if family.biased:
        more |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    for key, name in family.fields.items():
        if part := _SCALES_TENSORS.get(name):
            more[name] = tensors[f"blk.0.{part}.weight"].shape[-2]
        elif isinstance(value := numbers.values.get(key), bool):
            more[name] = value
        elif key in numbers.values:
            more[name] = (numbers.whole if key.startswith("expert_") else numbers.number)(key)
    width, heads = config["head_dim"], config["num_attention_heads"]
    if family.model_type == "granite":
        more.setdefault("attention_multiplier", width**-0.5)
    if family.shifted and family.period:  # Gemma's, by the number of layers as in llama.cpp
        largest = config["num_hidden_layers"] == family.largest
        more["query_pre_attn_scalar"] = config["hidden_size"] // heads if largest else width
    if family.partial:
        rotated = numbers.whole("rope.dimension_count", width) / width
        config["rope_parameters"]["partial_rotary_factor"] = more["partial_rotary_factor"] = rotated
    return more | _windows(numbers, config, family)


def _windows(numbers: KeyNumbers, config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the window of layers, and which of them have it."""
    window, layers = numbers.values.get("attention.sliding_window"), config["num_hidden_layers"]
    if family.model_type == "phi3":
        return {"sliding_window": numbers.whole("attention.sliding_window") if window else None}
    if family.period is None or not window and family.model_type == "olmo2":
        return {}
    if not window and family.model_type == "exaone4":  # the small one
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    default = 4096 if family.model_type == "gemma2" else None  # as llama.cpp's, for early files
    found: dict[str, Any] = {"sliding_window": numbers.whole("attention.sliding_window", default)}
    pattern = numbers.values.get("attention.sliding_window_pattern", family.period)
    if not isinstance(pattern, list):
        period = numbers.whole("attention.sliding_window_pattern", family.period)
        pattern = [bool((layer + 1) % period) for layer in range(layers)]
    if len(pattern) != layers:
        raise ValueError(f"attention.sliding_window_pattern has {len(pattern)} entries for {layers} layers")
    found["layer_types"] = ["sliding_attention" if short else "full_attention" for short in pattern]
    if family.model_type == "olmo2":
        found |= {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
    if family.local is not None or family.model_type == "olmo2":
        rope, theta = config["rope_parameters"], family.local or config["rope_theta"]
        local = {"rope_type": "default", "rope_theta": numbers.number("rope.freq_base_swa", theta)}
        found["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        del config["rope_theta"]
    return found


def _rows(numbers: KeyNumbers, facts: dict[str, Any], tensors: dict[str, StoredTensor]) -> int:
    """Return the size of the vocabulary. Raise ValueError unless there is an embedding per token."""
    rows = tensors["token_embd.weight"].shape[0]
    tokens = facts.get("tokenizer.ggml.tokens")
    count = numbers.whole("vocab_size", rows) if tokens is None else len(tokens)
    if rows != count:
        raise ValueError(f"{count} tokens, but {rows} embeddings")
    return rows


def _scaling(
    numbers: KeyNumbers, tensors: dict[str, StoredTensor], config: dict[str, Any], family: Family
) -> dict[str, Any]:
    """Return the scaling of the rotary embedding as llama.cpp reads it. Raise ValueError for an unknown one."""
    keys = numbers.values
    rope_type = keys.get("rope.scaling.type", "linear")
    stated = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) if rope_type != "none" else 0
    factor = 1.0 if stated == 0 else KeyNumbers({"rope.scaling.factor": stated}).number("rope.scaling.factor", most=1e6)
    attention = numbers.number("rope.scaling.attn_factor", 1.0)
    if family.partial and LONG_FACTORS[0] in tensors:
        return _longrope(numbers, tensors, config)
    if rope_type not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {rope_type!r:.40}, which is not read here")
    if attention != 1 and (rope_type != "yarn" or factor == 1):
        raise ValueError(f"rope.scaling.attn_factor {attention:g} without YaRN")
    if ROPE_FACTORS in tensors and family.factors:
        if factor != 1:
            raise ValueError(f"rotary factors together with rope.scaling.factor {factor:g}")
        return _llama_3(torch.from_numpy(tensors[ROPE_FACTORS].values()), config)
    if factor == 1:
        return {}
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        length = config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = numbers.whole("rope.scaling.original_context_length", length)
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1 if factor > 1 else 1)
        if config["model_type"] == "gpt_oss":
            scaling["truncate"] = False  # as in its checkpoints; no key says so
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in keys:
                scaling[name] = numbers.number(f"rope.scaling.yarn_{name}")
    return scaling


def _temperature(numbers: KeyNumbers, config: dict[str, Any]) -> dict[str, Any]:
    """Return Ministral 3's scaling of long texts' queries, and its factor of YaRN's attention."""
    rope, length = config["rope_parameters"], config["max_position_embeddings"]
    original = numbers.whole("rope.scaling.original_context_length", length)
    found: dict[str, Any] = {"original_max_position_embeddings": original}
    stated = "attention.temperature_scale" in numbers.values
    found["llama_4_scaling_beta"] = numbers.number("attention.temperature_scale") if stated else 0.0
    if rope["rope_type"] == "yarn" and "rope.scaling.yarn_log_multiplier" in numbers.values:
        multiplier = numbers.number("rope.scaling.yarn_log_multiplier")
        found["attention_factor"] = rope["attention_factor"] / (0.1 * multiplier * math.log(rope["factor"]) + 1)
    return found


def _longrope(numbers: KeyNumbers, tensors: dict[str, StoredTensor], config: dict[str, Any]) -> dict[str, Any]:
    """Return LongRoPE's scaling, whose long divisors count where a text is longer than the original context."""
    config["original_max_position_embeddings"] = original = numbers.whole("rope.scaling.original_context_length")
    short, long = (tensors[name].values().tolist() for name in LONG_FACTORS)
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": numbers.number("rope.scaling.attn_factor", 1.0),
    }  # fmt: skip


def _llama_3(factors: torch.Tensor, config: dict[str, Any]) -> dict[str, Any]:
    """Return Llama 3's scaling from its frequency divisors [d / 2]. Raise ValueError for other divisors."""
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA_3}
    plain = dict(config["rope_parameters"])
    inverse = [
        ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**{**config, "rope_parameters": plain | options}), "cpu")[0]
        for options in (scaling, scaling | {"factor": 1.0})
    ]
    if factors.shape != inverse[0].shape or not torch.allclose(inverse[1] / inverse[0], factors, rtol=1e-3):
        raise ValueError("rotary factors that are not Llama 3's")
    return scaling
