"""Quantised targets: their names in records, and the methods that a CPU does not support.

transformers quantises at load, or loads quantised weights. This module imports no quantisation library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from fsd_core.errors import ModelLoadError, foreign_errors
from fsd_core.functional import is_host
from fsd_infer.targets.gptq import METHODS, check_form
from fsd_infer.targets.weights import is_plain

PLAIN = "unquantised weights"
NEED_GPU = ("aqlm", "eetq", "fbgemm_fp8", "fouroversix", "fp_quant", "higgs", "nvfp4", "spqr", "vptq")  # no CPU kernels
_EXPANDED = ("fp8", "mxfp4", "mxfp8")  # a CPU can expand stored weights of these methods, but not quantise to them


def method_of(config: Any) -> str | None:
    """Return the method of a quantisation config (transformers' object or a dict) or of a model's config, or None."""
    quantization = _quantization(config)
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        return "bitsandbytes"  # older configs do not name it
    return None if method is None else str(getattr(method, "value", method))


def quantization_config(config: Any) -> Any:
    """Return a quantisation config as transformers takes it.

    A torchao dict may hold just its type, ``{"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}``.
    """
    if isinstance(config, Mapping) and method_of(config) == "torchao" and isinstance(config.get("quant_type"), str):
        named = {"_type": config["quant_type"], "_version": 2, "_data": dict(config.get("quant_type_kwargs") or {})}
        config = {**config, "quant_type": {"default": named}}
        config.pop("quant_type_kwargs", None)
    return config


def _quantization(config: Any) -> Mapping[str, Any]:
    """Return a quantisation config as a dict; empty if there is none."""
    if hasattr(config, "get_text_config"):
        config = getattr(config, "quantization_config", None)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return config if isinstance(config, Mapping) else {}


def check_quantization(config: Any, device: torch.device, stored: bool = True) -> None:
    """Raise ModelLoadError for quantised weights that this device does not support, or that name no method.

    Args:
        config: as in :func:`method_of`.
        device: device of the target.
        stored: the weights are quantised in their files, not at load.
    """
    method, quantization = method_of(config), _quantization(config)
    if method not in ("bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING):
        raise ModelLoadError(
            f"weights are quantised by {method!r}, which transformers does not read: use an unquantised checkpoint, or "
            "one of compressed-tensors. A quantization_config without quant_method, as of MLX, names none."
        )
    if not is_host(device):
        return
    if method == "torchao" and _torchao_kind(quantization.get("quant_type")) == "Int4WeightOnlyConfig":
        raise ModelLoadError(
            "torchao's Int4WeightOnlyConfig has products for GPUs only, and the target is on a CPU: use "
            "IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), or another device."
        )
    if method in NEED_GPU:
        raise ModelLoadError(
            f"weights quantised by {method!r} need a GPU, and the target is on a CPU: use torchao, bitsandbytes, "
            "quanto or compressed-tensors, or another device."
        )
    if method in (*_EXPANDED, *METHODS) and not stored:
        raise ModelLoadError(
            f"weights are quantised by {method!r} on a GPU only. On a CPU use torchao, bitsandbytes or quanto, or a "
            f"model stored in {method}, which is expanded."
        )
    if method in METHODS:
        check_form({**quantization, "quant_method": method})


@torch.no_grad()
def decompress(model: Any) -> None:
    """Decompress a model of compressed-tensors, whose first forward does so: later, parts of it run without the others.

    On a CPU its layers are wrapped to be moved between devices, from the CPU to the CPU. The wrappers are removed.
    """
    if method_of(getattr(model, "config", None)) != "compressed-tensors":
        return
    advice = f"{model.name_or_path} cannot be decompressed to {model.dtype} ({{why}}): load it with dtype bfloat16."
    with foreign_errors(ModelLoadError, advice):  # some formats are decompressed to bf16, whatever the model's dtype
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
    if is_host(model.device):
        try:
            from compressed_tensors.offload import remove_dispatch
        except ImportError:  # earlier versions do not wrap the layers
            return
        remove_dispatch(model, onload_tensors=True)
        for part in model.modules():  # what was restored is the method of the class
            if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
                del vars(part)["forward"]


def precision_of(model: Any) -> str:
    """Return a name for the precision of a model's linear layers: "" for plain weights, else "bitsandbytes nf4" …

    Targets of equal precision have equal names.
    """
    quantization = _quantization(getattr(model, "config", None))
    method = method_of(quantization)
    if method is None:
        return " ".join(sorted(_odd_weights(model.get_decoder())))
    return f"{method} {_kind(method, quantization)}".strip()


def _kind(method: str, config: Mapping[str, Any]) -> str:
    """The part of a method's config that matters most for the numbers."""
    if method == "bitsandbytes":
        return str(config.get("bnb_4bit_quant_type", "fp4")) if config.get("load_in_4bit") else "int8"
    if method == "quanto":
        return str(config.get("weights"))
    if method == "torchao":
        return _torchao_kind(config.get("quant_type"))
    if method == "compressed-tensors":
        groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)]
        return " ".join(sorted({_scheme(group) for group in groups}))
    bits = config.get("bits", config.get("nbits"))
    return "" if bits is None else f"int{bits}"


def _torchao_kind(quant_type: Any) -> str:
    while isinstance(quant_type, Mapping):  # {"default": {"_type": …}} in files
        if "_type" in quant_type:
            return str(quant_type["_type"])
        quant_type = next(iter(quant_type.values()), None)
    return quant_type if isinstance(quant_type, str) else type(quant_type).__name__


def _scheme(group: Mapping[str, Any]) -> str:
    """The scheme's name in compressed-tensors, such as "W4A16"."""
    weights, inputs = ((group.get(name) or {}) for name in ("weights", "input_activations"))
    float8 = weights.get("type") == "float" and weights.get("num_bits") == 8
    return "FP8" if float8 else f"W{weights.get('num_bits')}A{inputs.get('num_bits', 16)}"


def _odd_weights(decoder: nn.Module) -> set[str]:
    """The types of a decoder's matrices that are no plain weights."""
    odd = [part for part in decoder.modules() if isinstance(part, nn.Linear) and not is_plain(part)]
    weights = [getattr(part, "weight", None) for part in odd]
    return {type(weight).__name__ for weight in weights if not hasattr(weight, "full_tensor")}  # not sharded ones
