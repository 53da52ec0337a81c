"""Load GGUF files by transformers' reader, and refuse what it would drop, or draw at random, in silence."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_infer.targets.checks import check_numbers
from fsd_infer.targets.gguf_file import PARTS, StoredTensor
from fsd_infer.targets.gguf_keys import check_foreign_keys, end_ids
from fsd_infer.targets.kinds import attention_for


def foreign_config(source: Path, facts: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> PreTrainedConfig:
    """Return the config that transformers' reader makes of a file's metadata.

    Args:
        source: the file.
        facts, tensors: as :func:`.read_gguf` returns them.

    Raises:
        ModelLoadError: an architecture that it does not know, or keys that it leaves out.
        CheckpointError: numbers that no model has.
    """
    if PARTS in facts:
        raise ModelLoadError(f"{source} is one of {facts[PARTS]} parts. Merge them with llama-gguf-split first.")
    with foreign_errors(ModelLoadError, f"{source}: transformers cannot read this GGUF file ({{why}})."):
        config: Any = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        if config.num_hidden_layers > len(tensors):  # the model is built before its weights are compared
            raise ValueError(f"{config.num_hidden_layers} layers, but {len(tensors)} tensors")
    mapped: Any = GGUF_CONFIG_MAPPING.get(config.model_type) or GGUF_CONFIG_MAPPING.get(facts["general.architecture"])
    check_foreign_keys(facts, config, mapped or {}, source)
    check_numbers(config.to_dict(), f"{source}, by its metadata", "use another file of this model")
    return config


def load_foreign(
    source: Path,
    facts: dict[str, Any],
    tensors: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    attn_implementation: str | None,
) -> PreTrainedModel:
    """Load and expand a model by transformers' reader, which knows more architectures.

    Args:
        source, facts, tensors: as for :func:`foreign_config`.
        dtype, attn_implementation: as for :func:`fsd_infer.targets.gguf.load_gguf`.

    Raises:
        FsdError: as :func:`foreign_config`; and tensors that are missing, of other shapes, or left out.
    """
    config = foreign_config(source, facts, tensors)
    options: dict[str, Any] = {"attn_implementation": attn_implementation or attention_for(config)}
    options |= {"config": config, "dtype": dtype, "output_loading_info": True}
    with foreign_errors(ModelLoadError, f"{source}: transformers cannot read this GGUF file ({{why}})."):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, ignore_mismatched_sizes=True, **options
        )
    model, info = loaded
    for name, stored, expected in sorted({*info["mismatched_keys"], *_misshapen(model)}):
        refuse_shape(source, name, stored, expected)
    missing = info["missing_keys"]
    unread = () if missing else _unread(source, model, tensors, facts["general.architecture"])
    refuse_rest(source, model, unread, missing)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not _is_packed(model):  # whole weights are not quantised ones
        quantizer.remove_quantization_config(model)
    model.generation_config.eos_token_id = end_ids(facts) or model.generation_config.eos_token_id
    return model


def _misshapen(model: PreTrainedModel) -> list[tuple[str, torch.Size, torch.Size]]:
    """Return (name, its shape, the config's) of weights that early versions of transformers take in any shape."""
    if _is_packed(model):
        return []
    with torch.device("meta"):
        planned = type(model)(model.config).state_dict()
    state = model.state_dict()
    return [(name, x.shape, planned[name].shape) for name, x in state.items() if x.shape != planned[name].shape]


def _is_packed(model: PreTrainedModel) -> bool:
    """Whether the reader has kept blocks. If so, it reports itself what it leaves out."""
    return any(parameter.dtype == torch.uint8 for parameter in model.parameters())


def _unread(source: Path, model: PreTrainedModel, tensors: Mapping[str, StoredTensor], family: str) -> Collection[str]:
    """Return the tensors that transformers' reader has left out: it silently drops those that it does not know.

    It joins and renames some, so the numbers are counted; the names are of the gguf package's table. Raises
    ModelLoadError if the counts differ and all names are known.
    """
    state, layers = model.state_dict(), model.config.num_hidden_layers
    stored = {name: tensor for name, tensor in tensors.items() if not _is_mtp(name, layers)}
    tables: Any = model.get_input_embeddings(), model.get_output_embeddings()
    if family in ("falcon", "bloom") and tables[0].weight is tables[1].weight:  # the reader unties tables that differ
        stored.pop("output.weight", None)  # these files repeat the embeddings
    numbers = sum({value.data_ptr(): value.numel() for value in state.values()}.values())
    count = sum(math.prod(tensor.shape) for tensor in stored.values())
    if _is_packed(model) or numbers == count:
        return ()
    architectures = [architecture for architecture, name in MODEL_ARCH_NAMES.items() if name == family]
    names = get_tensor_name_map(architectures[0] if architectures else MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    unread = stored.keys() - {names.get_name(name, (".weight", ".bias")) for name in state}
    if not unread:
        raise ModelLoadError(f"{source}: its tensors hold {count} numbers, and its model {numbers}. Use another file.")
    return unread


def _is_mtp(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer after the last: without a key for MTP, such a layer would be refused before."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    return bool(rest) and block.isdecimal() and int(block) >= layers


def refuse_shape(source: Path, name: str, stored: Sequence[int], expected: Sequence[int]) -> None:
    """Raise ModelLoadError for a tensor whose shape is not its parameter's."""
    raise ModelLoadError(
        f"{source}: {name} has shape {list(stored)}, but its model needs {list(expected)}. Fetch the file again, "
        "or use the model's checkpoint."
    )


def refuse_rest(source: Path, model: Any, unread: Collection[str], missing: Collection[str]) -> None:
    """Raise ModelLoadError if tensors of the file are left, or parameters of the model are missing."""
    if unread:
        class_name = type(model).__name__
        raise ModelLoadError(f"{source}: tensor {min(unread)!r} has no place in a {class_name}. Use another file.")
    if missing:
        count = len(missing)
        raise ModelLoadError(f"{source} lacks {count} tensors of its model, first {min(missing)!r}. Fetch it again.")
