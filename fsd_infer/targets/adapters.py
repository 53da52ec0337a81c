"""LoRA adapters as peft writes them, merged into their base model's weights: W + scale · B · A (arXiv 2106.09685)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsd_infer.errors import CheckpointError, ModelLoadError
from fsd_infer.files import open_safetensors, read_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# values of these settings under which an adapter is more than W + scale · B · A
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
}


def is_adapter(directory: str | Path) -> bool:
    """Is this a directory with a LoRA adapter (rather than a whole model)?"""
    return os.path.isfile(os.path.join(os.path.expanduser(directory), ADAPTER_CONFIG))


def read_adapter_config(directory: str | Path) -> dict[str, Any]:
    """The settings of an adapter.

    Raises:
        CheckpointError: malformed, or without the name of the base model.
        ModelLoadError: an adapter that cannot be merged as a plain LoRA.
    """
    path = Path(directory).expanduser() / ADAPTER_CONFIG
    config = read_json(path, "Copy or export the adapter again.", CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object: copy or export the adapter again.")
    base, rank, alpha = config.get("base_model_name_or_path"), config.get("r"), config.get("lora_alpha")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{path} does not name the base model of the adapter: set base_model_name_or_path.")
    odd = [f"{name}={config[name]!r}" for name, plain in _PLAIN.items() if name in config and config[name] not in plain]
    if odd:
        raise ModelLoadError(
            f"{path.parent} is not a plain LoRA adapter ({', '.join(odd)}) and cannot be merged here. Merge it with "
            "peft (merge_and_unload, save_pretrained) and give the merged model's directory."
        )
    if not _positive(rank) or not isinstance(rank, int) or not _positive(alpha):
        raise CheckpointError(
            f"{path} has r={rank!r} and lora_alpha={alpha!r}; both must be positive numbers below 1e9."
        )
    return {**config, "base_model_name_or_path": base}


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def base_of(directory: str | Path) -> str:
    """The base model that an adapter's config names; a relative path is looked for beside the adapter first.

    Raises as :func:`read_adapter_config`.
    """
    base: str = read_adapter_config(directory)["base_model_name_or_path"]
    beside = Path(directory).expanduser() / base
    return str(beside) if os.path.isdir(beside) else base


def adapter_digest(directory: str | Path) -> str:
    """16 hexadecimal digits of an adapter's weights and scale; for `Target.weights_digest`."""
    config = read_adapter_config(directory)
    digest = hashlib.sha256(json.dumps([config["r"], config["lora_alpha"], config.get("use_rslora")]).encode())
    for name, tensor in sorted(adapter_tensors(directory).items()):
        digest.update(name.encode())
        digest.update(tensor.to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def merge_adapter(model: nn.Module, directory: str | Path) -> None:
    """Add a LoRA adapter to the weights of its base model, in place.

    Products and sums are formed in fp32 and rounded once, to the weight's dtype.

    Args:
        model: the base model as transformers loads it.
        directory: of the adapter.

    Raises:
        CheckpointError: tensors are missing, damaged, or do not belong to this model.
        ModelLoadError: see :func:`read_adapter_config`.
    """
    directory = Path(directory).expanduser()
    config = read_adapter_config(directory)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors = adapter_tensors(directory)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    while tensors:
        name = next(iter(tensors))
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        prefix = f"base_model.model.{module}"
        down, up = (tensors.pop(f"{prefix}.lora_{part}.weight", None) for part in "AB")  # [r, in], [out, r]
        weight = layers[module].weight if module in layers else None
        if (
            down is None
            or up is None
            or weight is None
            or ([*up.shape, *down.shape] != [weight.shape[0], rank, rank, weight.shape[1]])
        ):
            raise CheckpointError(
                f"{directory / ADAPTER_WEIGHTS} does not fit its {ADAPTER_CONFIG} (r={rank}) and base model "
                f"{config['base_model_name_or_path']!r}, first at {name!r}: use the files as they were trained."
            )
        change = up.to(weight.device, torch.float32) @ down.to(weight.device, torch.float32)
        weight.copy_(weight.to(torch.float32) + scale * change)


def adapter_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    """An adapter's weights by name. Raises CheckpointError: missing or damaged."""
    path = Path(directory).expanduser() / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {ADAPTER_WEIGHTS}: it is not a complete adapter.")
    with open_safetensors(path, "Copy or export the adapter again.") as file:
        return {name: file.get_tensor(name) for name in file.keys()}
