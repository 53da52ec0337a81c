"""A target without its layers: embeddings, final norm and LM head, enough for training on cached features."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from fsd_core.files import open_safetensors
from fsd_infer.targets.adapters import adapter_digest
from fsd_infer.targets.checks import weight_files
from fsd_infer.targets.kinds import attention_for, auto_class
from fsd_infer.targets.loading import adapter_of, explained, resolve_target
from fsd_infer.targets.target import Target

_AGAIN = "Download the model again."


def load_slim(name: str, dtype: torch.dtype) -> Target | None:
    """Load a target with all layers on the meta device, or return None if that is impossible.

    It needs a directory of safetensors and an embedding layer without computed buffers. The result cannot run; only
    :meth:`Target.embed`, its LM head and its facts are usable.
    """
    directory = Path(resolve_target(name))
    if not directory.is_dir():
        return None
    with explained(name):
        return _load(name, directory, dtype)


def _load(name: str, directory: Path, dtype: torch.dtype) -> Target | None:
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention_for(config))
    final_norm = getattr(model.get_decoder(), "norm", None)
    candidates = model.get_input_embeddings(), model.get_output_embeddings(), final_norm
    modules = [module for module in candidates if module is not None]
    if any(list(module.buffers()) for module in modules):
        return None
    files: dict[str, Path] = {}  # by the names of their tensors
    for file in weight_files(directory):
        with open_safetensors(file, _AGAIN) as tensors:
            files |= dict.fromkeys(tensors.keys(), file)
    parameter_ids = {id(parameter) for module in modules for parameter in module.parameters()}
    # tied weights count once
    keys = [key for key, parameter in model.named_parameters() if id(parameter) in parameter_ids]
    if not set(keys) <= set(files):
        return None
    model.requires_grad_(False)
    state = {key: _read(files[key], key).to(dtype) for key in keys}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    adapter = adapter_of(name)
    if adapter is not None:  # it changes only linear layers inside the decoder
        model.config.get_text_config(decoder=True).merged_adapter = adapter_digest(adapter)
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    has_tokenizer = any((directory / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return Target(model, AutoTokenizer.from_pretrained(directory) if has_tokenizer else None, name=name)


def _read(path: Path, key: str) -> torch.Tensor:
    with open_safetensors(path, _AGAIN) as file:
        tensor: torch.Tensor = file.get_tensor(key)
    return tensor


def move(target: Target, device: torch.device) -> None:
    """Move the loaded tensors of a target to a device, in place."""
    for tensor in [*target.model.parameters(), *target.model.buffers()]:
        if not tensor.is_meta and tensor.device != device:
            tensor.data = tensor.data.to(device)
