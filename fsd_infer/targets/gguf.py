"""Load models from GGUF files, with the weights in the file's blocks or expanded, and convert such files.

This module reads the architectures in :data:`FAMILIES`. Transformers reads the others, and expands their weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
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

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_core.files import write_json
from fsd_infer.targets.gguf_config import LONG_FACTORS, ROPE_FACTORS, config_of
from fsd_infer.targets.gguf_families import FAMILIES, family_of
from fsd_infer.targets.gguf_file import StoredTensor, read_gguf
from fsd_infer.targets.gguf_foreign import foreign_config, load_foreign, refuse_rest, refuse_shape
from fsd_infer.targets.gguf_keys import check_keys, check_no_mtp
from fsd_infer.targets.gguf_tokenizer import load_gguf_tokenizer, write_tokenizer
from fsd_infer.targets.kinds import attention_for
from fsd_infer.targets.weights import QuantizedWeight, ReadsBlocks, keep_quantized, readable_types, warn_once

_UNQUANTISED = ("F32", "F16", "BF16")  # types that are not quantised

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_DRAFTERS = re.compile(r"eagle|dflash|dspark|medusa|assistant|^mtp|nextn")  # architectures of llama.cpp's drafters


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
    config = config_of(facts, tensors, source)
    write_json(out_dir / "config.json", config, indent=2)
    write_json(out_dir / "generation_config.json", _generation_config(config), indent=2)
    weights, model = out_dir / "model.safetensors", _empty_model(AutoConfig.for_model(**config))
    parameters = _match_tensors(model, tensors, config, family_of(facts), source)
    state = {parameter.name: parameter.values(source).to(torch.bfloat16) for parameter in parameters}
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
        ModelLoadError: a truncated or malformed file, a missing part, or an architecture that transformers cannot read.
    """
    facts, tensors = _read(source)
    family = family_of(facts)
    if reads_blocks is not None and not (family and family.kept):
        kept = ", ".join(name for name, known in FAMILIES.items() if known.kept)
        warn_once(
            f"{source.name}: weights are expanded to bf16, slower and larger. Files of {kept} decode from their own "
            f"weights, and this one is of {family.model_type if family else facts.get('general.architecture')}."
        )
        reads_blocks = None
    if family is None:
        model = load_foreign(source, facts, tensors, dtype, attn_implementation)
        return model, load_gguf_tokenizer(source, facts)
    config = config_of(facts, tensors, source)
    hf_config = AutoConfig.for_model(**config)
    model = _empty_model(hf_config, dtype=dtype, attn_implementation=attn_implementation or attention_for(hf_config))
    lost = Counter[str]()  # weights in types that the backend does not read
    for parameter in _match_tensors(model, tensors, config, family, source):
        path, _, kind = parameter.name.rpartition(".")
        layer, stored = model.get_submodule(path), parameter.parts[0]
        tied = hf_config.tie_word_embeddings and path == "model.embed_tokens"
        holder = model.lm_head if tied else layer
        stays = kind == "weight" and isinstance(holder, (nn.Linear, nn.Embedding)) and reads_blocks is not None
        if stays and reads_blocks(int(stored.ggml_type), *stored.shape):  # type: ignore[misc]
            named = f"{parameter.name} of the GGUF file"
            value = keep_quantized(holder, QuantizedWeight(int(stored.ggml_type), stored.data, parameter.order, named))
        else:
            lost[stored.ggml_type.name] += len(stored.shape) == 2 and stored.ggml_type.name not in _UNQUANTISED
            value = nn.Parameter(parameter.values(source).to(dtype), requires_grad=False)
        for part in (layer, model.lm_head) if tied else (layer,):
            setattr(part, kind, value)
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
    if family_of(facts) is None:
        return foreign_config(source, facts, tensors)
    return AutoConfig.for_model(**config_of(facts, tensors, source))


def _read(source: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Return the metadata and the tensors of a file."""
    facts, tensors = read_gguf(source)
    check_no_mtp(facts, tensors, source)
    if _DRAFTERS.search(str(facts.get("general.architecture"))):
        raise ModelLoadError(f"{source} is a draft head, and those are not read from GGUF files: give its safetensors.")
    if (family := family_of(facts)) is not None:
        check_keys(facts, source, family.read)
    return facts, tensors


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the model, and what it is made of.

    Attributes:
        name: transformers' name.
        parts: its tensors.
        shape: its own.
        order: of the rows; None: the same.
        join: makes one tensor of several.
        shift: is subtracted.
    """

    name: str
    parts: tuple[StoredTensor, ...]
    shape: torch.Size
    order: torch.Tensor | None = None
    join: Callable[..., torch.Tensor] | None = None
    shift: float = 0.0

    def values(self, source: Path) -> torch.Tensor:
        """Return it in fp32."""
        with foreign_errors(ModelLoadError, f"{source}: {{why}}. Use another file of this model."):
            parts = [torch.from_numpy(part.values()) for part in self.parts]
        values = self.join(*parts) if self.join is not None else parts[0]
        if _squeezed(values.shape) != _squeezed(self.shape):
            refuse_shape(source, self.name, values.shape, self.shape)
        values = values.reshape(self.shape).contiguous()
        values = values - self.shift if self.shift else values
        return values if self.order is None else values[self.order]


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
    """Return a model whose parameters are on "meta", unlike what it computes from its config."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()  # which the context undoes
    return model


def _match_tensors(
    model: Any, tensors: dict[str, StoredTensor], config: dict[str, Any], family: Any, source: Path
) -> list[_Parameter]:
    """Return the model's parameters with their tensors.

    Raises:
        ModelLoadError: tensors that are missing, too many, or of other shapes.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    known = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    if family.architecture not in known:
        raise ModelLoadError(f"{source}: this version of the gguf package does not know {family.architecture}.")
    names = get_tensor_name_map(known[family.architecture], config["num_hidden_layers"])
    unmatched = dict(tensors)
    if config["rope_parameters"].get("rope_type") in ("llama3", "longrope"):
        for name in (ROPE_FACTORS, *LONG_FACTORS):  # the config has them
            unmatched.pop(name, None)
    parameters, missing = [], []
    for name, parameter in model.named_parameters():  # lists a tied weight once, as the embedding
        layer = _LAYER.match(name)
        if layer and (join := family.joins.get(name[layer.end() :])):
            theirs, make = tuple(f"blk.{layer[1]}.{part}" for part in join[0]), join[1]
        else:
            theirs, make = (names.get_name(name, (".weight", ".bias")) or "",), None
        if not unmatched.keys() >= set(theirs):
            missing.append(name)
            continue
        stored = tuple(unmatched.pop(part) for part in theirs)
        if make is None and _squeezed(stored[0].shape) != _squeezed(parameter.shape):
            refuse_shape(source, name, stored[0].shape, parameter.shape)
        order, part = None, theirs[0].split(".")[-2]
        if family.interleaved and part in heads:
            order = split_half_rope(torch.arange(stored[0].shape[0])[:, None], heads[part])[:, 0].contiguous()
        shift = float(family.shifted and name.endswith("norm.weight"))
        parameters.append(_Parameter(name, stored, parameter.shape, order, make, shift))
    refuse_rest(source, model, unmatched, missing)
    return parameters


def _squeezed(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
