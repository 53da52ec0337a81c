"""Load models from GGUF files, with the weights in the file's blocks or expanded, and convert such files.

This module reads the architectures in :data:`FAMILIES`. Transformers reads the others, and expands their weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, get_tensor_name_map
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_core.files import write_json
from fsd_infer.targets.gguf_file import StoredTensor, read_gguf
from fsd_infer.targets.gguf_foreign import foreign_config, load_foreign, refuse_rest, refuse_shape
from fsd_infer.targets.gguf_keys import KeyNumbers, architecture_keys, check_keys, check_no_mtp, end_ids
from fsd_infer.targets.gguf_tokenizer import load_gguf_tokenizer, write_tokenizer
from fsd_infer.targets.weights import QuantizedWeight, ReadsBlocks, keep_quantized, readable_types, warn_once

FAMILIES = ("llama", "qwen2", "qwen3")  # architectures, which are also transformers' model types
_UNQUANTISED = ("F32", "F16", "BF16")  # types that are not quantised
_INTERLEAVED = ("llama",)  # their query and key projections have rows in ggml's rotary order

_DRAFTERS = re.compile(r"eagle|dflash|dspark|medusa|assistant|^mtp|nextn")  # architectures of llama.cpp's drafters
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, in Llama 3
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def expand_gguf(source: Path, out_dir: Path) -> None:
    """Write config, generation config, bf16 safetensors, tokenizer and chat template of ``source`` to ``out_dir``.

    Args:
        source: a GGUF file with an architecture in :data:`FAMILIES`, a byte-level BPE vocabulary with a pre-tokenizer
            in :data:`fsd_infer.targets.gguf_tokenizer.PRE_TOKENIZERS`, and ggml types that gguf-py reads.
        out_dir: an existing directory. Files of the same names are overwritten.

    Raises:
        ModelLoadError: not a GGUF file, or one with an unknown architecture or vocabulary.
    """
    facts, tensors = _read(source)
    config = _config(facts, tensors, source)
    write_json(out_dir / "config.json", config, indent=2)
    write_json(out_dir / "generation_config.json", _generation_config(config), indent=2)
    weights, model = out_dir / "model.safetensors", _empty_model(AutoConfig.for_model(**config))
    parameters = _match_tensors(model, tensors, config, source)
    state = {name: _expanded(stored, order, source).to(torch.bfloat16) for name, stored, order in parameters}
    save_file(state, weights, metadata={"format": "pt"})
    weights.chmod((out_dir / "config.json").stat().st_mode)  # safetensors lets only the owner read its files
    write_tokenizer(facts, out_dir, source)


def load_gguf(
    source: Path, dtype: torch.dtype, attn_implementation: str | None = None, reads_blocks: ReadsBlocks | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model on the CPU, and its tokenizer.

    Args:
        source: a GGUF file. If its architecture is not in :data:`FAMILIES`, transformers reads and expands it.
        dtype: data type of expanded weights and of activations.
        attn_implementation: as in transformers; None: "sdpa".
        reads_blocks: whether a backend computes with a weight of this ggml type, rows and columns. Such weights stay in
            their blocks, as :class:`.QuantizedWeight` on their layers, until the backend prepares the model. None: all
            are expanded.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelLoadError: a truncated, malformed or split file, or an architecture that transformers cannot read.
    """
    facts, tensors = _read(source)
    family = facts.get("general.architecture")
    if family not in FAMILIES:
        if reads_blocks is not None:
            warn_once(
                f"{source.name}: weights are expanded to bf16, slower and larger, because transformers reads {family} "
                f"files. Those of {', '.join(FAMILIES)} decode from their own weights."
            )
        model = load_foreign(source, facts, tensors, dtype, attn_implementation)
        return model, load_gguf_tokenizer(source, facts)
    config = _config(facts, tensors, source)
    hf_config = AutoConfig.for_model(**config)
    model = _empty_model(hf_config, dtype=dtype, attn_implementation=attn_implementation or "sdpa")
    lost = Counter[str]()  # weights in types that the backend does not read
    for name, stored, order in _match_tensors(model, tensors, config, source):
        path, _, parameter = name.rpartition(".")
        layer = model.get_submodule(path)
        tied = hf_config.tie_word_embeddings and path == "model.embed_tokens"
        holder = model.lm_head if tied else layer
        stays = parameter == "weight" and isinstance(holder, (nn.Linear, nn.Embedding)) and reads_blocks is not None
        if stays and reads_blocks(int(stored.ggml_type), *stored.shape):  # type: ignore[misc]
            blocks = QuantizedWeight(int(stored.ggml_type), stored.data, order, f"{name} of the GGUF file")
            value = keep_quantized(holder, blocks)
        else:
            lost[stored.ggml_type.name] += len(stored.shape) == 2 and stored.ggml_type.name not in _UNQUANTISED
            value = nn.Parameter(_expanded(stored, order, source).to(dtype), requires_grad=False)
        for part in (layer, model.lm_head) if tied else (layer,):
            setattr(part, parameter, value)
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=hf_config)  # computes its buffers, which are still on "meta"
    model.generation_config = GenerationConfig(**_generation_config(config))
    hf_config._name_or_path = str(source)
    if reads_blocks is not None:
        _warn_expanded(source.name, +lost, reads_blocks)
    return model, load_gguf_tokenizer(source, facts)


def _warn_expanded(name: str, lost: Mapping[str, int], reads_blocks: ReadsBlocks) -> None:
    if lost:
        types = ", ".join(f"{count} in {ggml_type}" for ggml_type, count in sorted(lost.items()))
        readable = [GGMLQuantizationType(ggml_type).name for ggml_type in readable_types(reads_blocks)]
        warn_once(
            f"{name}: weights are expanded to bf16, slower and larger, because the kernels do not read them ({types}). "
            f"A file in {', '.join(readable[:-1])} or {readable[-1]} decodes from its own weights."
        )


def load_gguf_config(source: Path) -> PreTrainedConfig:
    """Return the config of a GGUF file's model.

    Args:
        source: a GGUF file.

    Raises:
        ModelLoadError: as for :func:`load_gguf`.
    """
    facts, tensors = _read(source)
    if facts.get("general.architecture") not in FAMILIES:
        return foreign_config(source, facts, tensors)
    return AutoConfig.for_model(**_config(facts, tensors, source))


def _read(source: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a file."""
    facts, tensors = read_gguf(source)
    check_no_mtp(facts, tensors, source)
    if _DRAFTERS.search(str(facts.get("general.architecture"))):
        raise ModelLoadError(f"{source} is a draft head, and those are not read from GGUF files: give its safetensors.")
    if facts.get("general.architecture") in FAMILIES:
        check_keys(facts, source)
    return facts, tensors


def _config(facts: dict[str, Any], tensors: dict[str, StoredTensor], source: Path) -> dict[str, Any]:
    """Return the arguments of the model's config.

    Raises:
        ModelLoadError: an architecture outside :data:`FAMILIES`, or missing or invalid metadata.
    """
    family = facts.get("general.architecture")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelLoadError(f"{source} has architecture {family!r}. Only {known} can be expanded to a directory.")
    numbers, advice = KeyNumbers(architecture_keys(facts)), "Use another file of this model."
    with foreign_errors(ModelLoadError, f"{source}: its metadata are incomplete or invalid ({{why}}). {advice}"):
        config = _sizes(numbers, facts, str(family))
        config |= {"vocab_size": _rows(numbers, facts, tensors)}
        config |= {"tie_word_embeddings": "output.weight" not in tensors}
        layers = config["num_hidden_layers"]
        if layers > len(tensors):  # the model is built before its weights are compared
            raise ValueError(f"{layers} layers, but {len(tensors)} tensors")
        config["rope_parameters"] |= _scaling(numbers, tensors, config)
    return config


def _sizes(numbers: KeyNumbers, facts: dict[str, Any], family: str) -> dict[str, Any]:
    hidden, heads = numbers.whole("embedding_length"), numbers.whole("attention.head_count")
    theta, ends = numbers.number("rope.freq_base", 10_000.0), end_ids(facts)
    width = numbers.whole("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if numbers.whole(name, width) != width:
            raise ValueError(f"{name} is {numbers.values[name]}, but keys have {width} dimensions")
    groups = numbers.whole("attention.head_count_kv", heads)
    if width % 2 or heads % groups:
        raise ValueError(f"{heads} heads of {width} dimensions for {groups} heads of keys")
    eos = ends[0] if len(ends) == 1 else ends or None
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]],
        "model_type": family,
        "attention_dropout": 0.0,
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": width,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": numbers.whole("feed_forward_length"),
        "max_position_embeddings": numbers.whole("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": numbers.whole("block_count"),
        "num_key_value_heads": groups,
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id", ends[0] if ends else None),
        # GGUF stores the epsilon as fp32, in which 1e-05 reads 9.9999997e-06
        "rms_norm_eps": float(f"{numbers.number('attention.layer_norm_rms_epsilon', most=0.01):.6g}"),
        # in both forms, for other readers of the directory, such as vLLM and older transformers
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "use_cache": True,
        **({"attention_bias": False, "mlp_bias": False} if family == "llama" else {}),
    }


def _rows(numbers: KeyNumbers, facts: dict[str, Any], tensors: dict[str, StoredTensor]) -> int:
    """Return the size of the vocabulary. Raise ValueError unless there is an embedding per token."""
    rows = tensors["token_embd.weight"].shape[0]
    tokens = facts.get("tokenizer.ggml.tokens")
    count = numbers.whole("vocab_size", rows) if tokens is None else len(tokens)
    if rows != count:
        raise ValueError(f"{count} tokens, but {rows} embeddings")
    return rows


def _scaling(numbers: KeyNumbers, tensors: dict[str, StoredTensor], config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of the rotary embedding as llama.cpp reads it. Raise ValueError for an unknown one."""
    keys = numbers.values
    rope_type = keys.get("rope.scaling.type", "linear")
    stated = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) if rope_type != "none" else 0
    factor = 1.0 if stated == 0 else KeyNumbers({"rope.scaling.factor": stated}).number("rope.scaling.factor", most=1e6)
    attention = numbers.number("rope.scaling.attn_factor", 1.0)
    if rope_type not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {rope_type!r:.40}, which is not read here")
    if attention != 1 and (rope_type != "yarn" or factor == 1):
        raise ValueError(f"rope.scaling.attn_factor {attention:g} without YaRN")
    if _ROPE_FACTORS in tensors and config["model_type"] == "llama":
        if factor != 1:
            raise ValueError(f"rotary factors together with rope.scaling.factor {factor:g}")
        return _llama_3(torch.from_numpy(tensors[_ROPE_FACTORS].values()), config)
    if factor == 1:
        return {}
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": factor}
    if rope_type == "yarn":
        length = config["max_position_embeddings"]
        scaling["original_max_position_embeddings"] = numbers.whole("rope.scaling.original_context_length", length)
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1 if factor > 1 else 1)
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in keys:
                scaling[name] = numbers.number(f"rope.scaling.yarn_{name}")
    return scaling


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


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _expanded(stored: StoredTensor, order: torch.Tensor | None, source: Path) -> torch.Tensor:
    """Return the tensor in fp32 with its rows in ``order``."""
    with foreign_errors(ModelLoadError, f"{source}: {{why}}. Use another file of this model."):
        values = torch.from_numpy(stored.values())
    return values if order is None else values[order]


def split_half_rope(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo ggml's interleaved rotary layout of a query or key projection.

    Args:
        weight: [heads * d, hidden], rows of a head ordered (0, d/2, 1, d/2 + 1, ...).
        heads: number of heads in ``weight``.

    Returns:
        [heads * d, hidden], rows of a head ordered (0, 1, ..., d - 1), as transformers rotates them.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _empty_model(config: PreTrainedConfig, **options: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


def _match_tensors(
    model: Any, tensors: dict[str, StoredTensor], config: dict[str, Any], source: Path
) -> list[tuple[str, StoredTensor, torch.Tensor | None]]:
    """Return the name of each of the model's parameters, its tensor, and the order of its rows (None: the same).

    Raises:
        ModelLoadError: tensors that are missing, too many, or of other shapes.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = get_tensor_name_map(MODEL_ARCH[config["model_type"].upper()], config["num_hidden_layers"])
    unmatched = dict(tensors)
    if config["rope_parameters"]["rope_type"] == "llama3":
        del unmatched[_ROPE_FACTORS]  # _scaling() has read them
    parameters, missing = [], []
    for name, parameter in model.named_parameters():  # lists a tied weight once, as the embedding
        theirs = names.get_name(name, (".weight", ".bias")) or ""
        stored = unmatched.pop(theirs, None)
        if stored is None:
            missing.append(name)
            continue
        if stored.shape != parameter.shape:
            refuse_shape(source, name, stored.shape, parameter.shape)
        order, part = None, theirs.split(".")[-2]
        if config["model_type"] in _INTERLEAVED and part in heads:
            order = split_half_rope(torch.arange(stored.shape[0])[:, None], heads[part])[:, 0].contiguous()
        parameters.append((name, stored, order))
    refuse_rest(source, model, unmatched, missing)
    return parameters
