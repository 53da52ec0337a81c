"""LoRA adapters as peft writes them: W + scale · B · A (arXiv 2106.09685), merged into their base model's weights.

Quantised weights, and requests that each name an adapter, do not allow merging. There peft's layers compute the adapter
beside the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsd_core.errors import CheckpointError, ModelLoadError, imported, shortened
from fsd_core.files import open_safetensors, read_json
from fsd_core.registry import is_number, is_whole

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# The fields of peft's LoraConfig. An adapter with another field, or another value, is more than W + scale · B · A.
_READ = frozenset({"base_model_name_or_path", "r", "lora_alpha", "use_rslora", "revision"})
_HARMLESS = frozenset(  # about training or saving, or about which layers have tensors, which the file shows
    """
    task_type auto_mapping peft_version inference_mode target_modules exclude_modules layers_to_transform
    layers_pattern lora_dropout megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size
    runtime_config unsloth_fixed
    """.split()
)
_PROMPTS = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # other initialisations change the weights that an adapter is added to
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
# what peft's layers compute, though it cannot be merged here
_UNMERGED = frozenset("use_dora fan_in_fan_out rank_pattern alpha_pattern lora_bias use_qalora use_bdlora".split())


def is_adapter(directory: str | Path) -> bool:
    """Whether this is a directory with a LoRA adapter rather than a whole model."""
    return os.path.isfile(os.path.join(os.path.expanduser(directory), ADAPTER_CONFIG))


def read_adapter_config(directory: str | Path, unmerged: bool = False) -> dict[str, Any]:
    """Read the settings of an adapter.

    Args:
        directory: directory of the adapter.
        unmerged: whether peft is to compute the adapter, next to the weights. Its layers know more kinds of LoRA.

    Raises:
        CheckpointError: malformed, or without the name of the base model.
        ModelLoadError: an adapter that is not a plain LoRA.
    """
    path = Path(directory).expanduser() / ADAPTER_CONFIG
    config = read_json(path, "Copy or export the adapter again.", CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object: copy or export the adapter again.")
    base, rank, alpha = config.get("base_model_name_or_path"), config.get("r"), config.get("lora_alpha")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{path} does not name the base model of the adapter: set base_model_name_or_path.")
    allowed = _READ | _HARMLESS | (_UNMERGED if unmerged else frozenset())
    peft_type = str(config.get("peft_type"))
    if peft_type in _PROMPTS:
        raise ModelLoadError(
            f"{path.parent} is of type {peft_type}: what it trains is no part of the weights. Use a LoRA."
        )
    odd = [f"{name}={value!r:.60}" for name, value in config.items() if name not in allowed and _is_odd(name, value)]
    if odd:
        raise ModelLoadError(
            f"{path.parent} is not a plain LoRA adapter ({', '.join(odd)}) and cannot be merged here. Merge it "
            "with peft (merge_and_unload, save_pretrained) and give the merged model's directory."
        )
    if config.get("use_rslora") not in (True, False, None):
        raise CheckpointError(f"{path}: use_rslora is {config['use_rslora']!r:.60}, but must be true or false.")
    if not is_whole(rank, 1, 10**9) or not is_number(alpha, 0, 1e9) or not alpha:
        raise CheckpointError(
            f"{path} has r={rank!r} and lora_alpha={alpha!r}; both must be positive numbers up to 1e9."
        )
    return {**config, "base_model_name_or_path": base}


def _is_odd(name: str, value: Any) -> bool:
    """Whether a field has a value that is not supported. Fields that peft adds later must be unset."""
    if name in _PLAIN:
        return value not in _PLAIN[name]
    return not (value is None or value is False or value in ({}, []))


def base_of(directory: str | Path) -> str:
    """Return the base model that an adapter's config names; a path relative to the adapter takes precedence.

    Raises as :func:`read_adapter_config` for an adapter that can stay unmerged.
    """
    base: str = read_adapter_config(directory, unmerged=True)["base_model_name_or_path"]
    inside = Path(directory).expanduser() / base
    return str(inside) if os.path.isdir(inside) else base


def adapter_digest(directory: str | Path) -> str:
    """Return 16 hexadecimal digits of an adapter's weights and scale, for `Target.weights_digest`."""
    config = read_adapter_config(directory)
    digest = hashlib.sha256(json.dumps([config["r"], config["lora_alpha"], config.get("use_rslora")]).encode())
    for name, tensor in sorted(adapter_tensors(directory).items()):
        digest.update(name.encode())
        digest.update(tensor.to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def add_adapter(model: Any, directory: str | Path, merge: bool) -> None:
    """Apply an adapter to a base model, merged or unmerged, and record its digest in the config.

    Raises as :func:`merge_adapter` and :func:`add_adapters`.
    """
    if merge:
        merge_adapter(model, directory)
        model.config.get_text_config(decoder=True).merged_adapter = adapter_digest(directory)
    else:
        add_adapters(model, {"default": directory})
        _use(model, "default")


def add_adapters(model: Any, adapters: Mapping[str, str | Path]) -> None:
    """Add unmerged adapters to a model, by name; all are inactive until :func:`adapted`.

    Raises ModelLoadError: files are missing or damaged, an adapter changes more than layers' outputs, or peft is not
    installed or refuses it.
    """
    if not isinstance(adapters, Mapping):
        raise ModelLoadError(f'adapters are directories by name, {{"legal": DIR}}, got {adapters!r:.60}.')
    peft = imported("peft", "an unmerged adapter", "train", ModelLoadError)
    for name, directory in adapters.items():
        try:
            read_adapter_config(directory, unmerged=True)
            tensors = _without_copies(model, adapter_tensors(directory))
            config = peft.PeftConfig.from_pretrained(str(Path(directory).expanduser()))
            peft.inject_adapter_in_model(config, model, name)
            _fill(model, name, tensors)
        except Exception as error:  # peft builds layers from files: any kind of error may occur
            raise ModelLoadError(f"the adapter {name}={directory} cannot be loaded: {shortened(error)}") from error
    _use(model, None)
    model.requires_grad_(False)


def _without_copies(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors without the base's embeddings, which peft saves beside an adapter of them.

    Raises CheckpointError for tables that differ from the model's: the adapter was trained with others.
    Raises ModelLoadError for whole weights, which no LoRA has.
    """
    result = dict(tensors)
    for key in [key for key in tensors if key.endswith(".base_layer.weight")]:
        table: Any = model.get_submodule(key.removeprefix("base_model.model.").removesuffix(".base_layer.weight"))
        weight, copy = getattr(table, "base_layer", table).weight, result.pop(key)
        if weight.shape != copy.shape or not torch.equal(weight.detach().cpu(), copy.to(weight.dtype)):
            raise CheckpointError(f"{key} differs from the base's: merge the adapter with peft (merge_and_unload).")
    if dense := [key for key in result if ".lora_" not in key]:
        raise ModelLoadError(
            f"the adapter has {dense[0]!r} as a whole (a vocabulary of another size, or modules_to_save), not as a "
            "LoRA. Merge it with peft (merge_and_unload, save_pretrained) and give the merged model's directory."
        )
    return result


@torch.no_grad()
def _fill(model: nn.Module, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy an adapter's tensors into peft's layers, which are new.

    Raises CheckpointError for tensors without a place, and for places without a tensor.
    """
    layers = {id(module) for module in lora_layers(model)}
    parameters = {
        f"{path}.{key.replace(f'.{name}', '', 1)}".removesuffix(".weight"): parameter
        for path, module in model.named_modules()
        if id(module) in layers
        for key, parameter in module.named_parameters()
        if f".{name}." in f".{key}." and not key.startswith("base_layer.")
    }
    named = {key.removeprefix("base_model.model.").removesuffix(".weight"): tensor for key, tensor in tensors.items()}
    if odd := sorted(parameters.keys() ^ named.keys()):
        missing = odd[0] in parameters
        raise CheckpointError(
            f"{ADAPTER_WEIGHTS} {'lacks' if missing else 'holds'} {odd[0]!r}, {'which' if missing else 'but'} its "
            f"{ADAPTER_CONFIG} {'asks' if missing else 'does not ask'} for: use the files as they were trained."
        )
    for key, parameter in parameters.items():
        parameter.copy_(named[key])


def lora_layers(model: nn.Module) -> list[Any]:
    """Return peft's layers in a model, which compute unmerged adapters."""
    return [
        layer for layer in model.modules() if hasattr(layer, "adapter_layer_names") and hasattr(layer, "base_layer")
    ]


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of a model's unmerged adapters."""
    return sorted({name for layer in lora_layers(model) for name in layer._get_available_adapters()})


def unmerged_digest(model: nn.Module) -> str:
    """Return 16 hexadecimal digits of a model's active unmerged adapters; "" if none is active."""
    digest, active = hashlib.sha256(), False
    for layer in lora_layers(model):
        names = [] if layer.disable_adapters else layer.active_adapters
        for key, tensor in sorted(layer.named_parameters()):
            if not key.startswith("base_layer.") and any(f".{name}." in f".{key}." for name in names):
                digest.update(key.encode() + tensor.detach().to("cpu", torch.float32).numpy().tobytes())
                active = True
    return digest.hexdigest()[:16] if active else ""


def _use(model: nn.Module, name: str | None) -> None:
    for layer in lora_layers(model):
        if name is not None:
            layer.set_adapter(name)
        layer.enable_adapters(name is not None)


@contextmanager
def adapted(model: nn.Module, name: str) -> Iterator[None]:
    """Activate the adapter of that name within the block; "none" activates only the base weights.

    Raises ModelLoadError: there is no such unmerged adapter.
    """
    names = adapter_names(model)
    if name not in (*names, "none"):
        raise ModelLoadError(
            f"no adapter {name!r}: this target has {', '.join(names) or 'none'}. Load adapters by "
            "from_pretrained(..., adapters={name: directory})."
        )
    states = [(layer, layer.active_adapters, layer.disable_adapters) for layer in lora_layers(model)]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        _use(model, None if name == "none" else name)
        yield
    finally:
        for layer, active, disabled in states:
            layer.set_adapter(active)
            layer.enable_adapters(not disabled)
        for parameter, required in grads:
            parameter.requires_grad_(required)


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a peft wrapper, whose layers hold the adapters; other models pass through.

    Raises ModelLoadError: prompt or prefix tuning, whose parameters lie outside the layers.
    """
    configs = getattr(model, "peft_config", None)
    if not callable(getattr(model, "get_base_model", None)) or not isinstance(configs, Mapping):
        return model
    kinds = [str(config.peft_type) for config in configs.values() if getattr(config, "is_prompt_learning", False)]
    if kinds:
        raise ModelLoadError(
            f"{', '.join(kinds)}: its trained parameters are not part of the layers, so drafts cannot be verified with "
            "it. Use a LoRA."
        )
    return model.get_base_model()


@torch.no_grad()
def merge_adapter(model: nn.Module, directory: str | Path) -> None:
    """Add a LoRA adapter to the weights of its base model, in place.

    Computes in fp32 and rounds once, to the weight's dtype.

    Args:
        model: the base model as transformers loads it.
        directory: directory of the adapter.

    Raises:
        CheckpointError: tensors are missing, damaged, or do not belong to this model.
        ModelLoadError: an adapted embedding; or see :func:`read_adapter_config`.
    """
    directory = Path(directory).expanduser()
    config = read_adapter_config(directory)
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    tensors: dict[str, Any] = _without_copies(model, adapter_tensors(directory))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if embedded := [name for name in tensors if ".lora_embedding_" in name]:
        raise ModelLoadError(
            f"{directory} adapts an embedding ({embedded[0]!r}), which is not merged here. Merge it with peft "
            "(merge_and_unload), or load it unmerged (adapters={name: directory})."
        )
    while tensors:
        name = next(iter(tensors))
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        prefix = f"base_model.model.{module}"
        down, up = (tensors.pop(f"{prefix}.lora_{part}.weight", None) for part in "AB")  # [r, in], [out, r]
        weight: Any = layers[module].weight if module in layers else None
        if id(weight) in tables:
            raise ModelLoadError(
                f"{directory} adapts {module}, whose weight is the embeddings', too, and would change them. Load it "
                "unmerged (adapters={name: directory})."
            )
        missing = any(part is None for part in (up, down, weight))
        if missing or [*up.shape, *down.shape] != [len(weight), rank, rank, weight.shape[1]]:
            raise CheckpointError(
                f"{directory / ADAPTER_WEIGHTS} does not fit its {ADAPTER_CONFIG} (r={rank}) and base model "
                f"{config['base_model_name_or_path']!r}, first at {name!r}: use the files as they were trained."
            )
        change = up.to(weight.device, torch.float32) @ down.to(weight.device, torch.float32)
        weight.copy_(weight.to(torch.float32) + scale * change)


def adapter_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    """Read an adapter's weights by name. Raises CheckpointError: missing, damaged or empty."""
    path = Path(directory).expanduser() / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_WEIGHTS}: it is not a complete adapter. If it has adapter_model.bin, load "
            "that with peft and save it again."
        )
    with open_safetensors(path, "Copy or export the adapter again.") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors, so the adapter would change nothing: export it again.")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not bool(tensor.float().isfinite().all()):
            raise CheckpointError(
                f"{path}: {name} holds {tensor.dtype} numbers or numbers that are not finite, but a LoRA's factors are "
                "finite floats: export the adapter again."
            )
    return tensors
