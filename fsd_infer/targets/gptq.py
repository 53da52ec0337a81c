"""Load checkpoints of GPTQ and AWQ on a CPU, without the libraries that made them.

A weight is scale · (code − zero), with a scale and a zero per output and group of inputs. All weights are expanded.
Scales and zeros stay with each layer, so that a backend may compute by codes.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig

from fsd_core.errors import CheckpointError, ModelLoadError, foreign_errors
from fsd_core.files import open_safetensors
from fsd_core.registry import is_whole
from fsd_infer.targets.checks import weight_files
from fsd_infer.targets.kinds import class_of
from fsd_infer.targets.weights import GroupedWeight, keep_quantized, warn_once

METHODS = ("gptq", "awq")
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_RAGGED = "with groups of several sizes, such as a shorter last one"
_REORDERED = "with groups in the order of activations (desc_act)"
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # place of each of eight codes in its word


def check_form(config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a form of GPTQ or AWQ that this module does not read."""
    method, bits = config["quant_method"], config.get("bits", config.get("w_bit", 4))
    form = _form(config)
    if form not in _forms(method) or bits not in ((4, 8) if method == "gptq" else (4,)):
        raise ModelLoadError(
            f"weights are quantised by {method!r} in format {form!r} with {bits!r} bits, which a CPU cannot read: "
            "use GPTQ with 4 or 8 bits, AWQ in format 'gemm' with 4 bits, or another device."
        )
    rules = [rule for rule in (config.get("dynamic") or {}).values() if isinstance(rule, Mapping)]
    if any(rule.get("bits", bits) != bits for rule in rules):
        raise ModelLoadError(
            f"weights are quantised by {method!r} with other bits than {bits} in some layers (dynamic), which a CPU "
            "cannot read: use a checkpoint of one width, or another device."
        )


def _forms(method: str) -> tuple[str, ...]:
    return ("gptq", "gptq_v2") if method == "gptq" else ("gemm",)


def _form(config: Mapping[str, Any]) -> str:
    named = config.get("checkpoint_format") or config.get("format") or config.get("version")
    return str(named or _forms(config["quant_method"])[0]).lower()


def load_expanded(
    source: str, config: PretrainedConfig, where: Mapping[str, Any], **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a quantised causal LM with expanded weights.

    Args:
        source: a directory or hub id.
        config: config of the model, with its ``quantization_config``.
        where: arguments that locate the files, as in transformers.
        options: further arguments of transformers' ``from_pretrained``.

    Returns:
        (model on the CPU, transformers' loading info)

    Raises:
        CheckpointError: a layer lacks parts, or their shapes do not fit.
    """
    quantization: Any = config.quantization_config
    facts = dict(quantization if isinstance(quantization, Mapping) else quantization.to_dict())
    state: dict[str, Tensor] = {}
    hub = {name: value for name, value in where.items() if name != "trust_remote_code"}
    for file in weight_files(_directory(source, hub)):
        with open_safetensors(file, "Copy or fetch it again.") as opened:
            state |= {key: opened.get_tensor(key) for key in opened.keys()}
    lost = Counter[str]()
    groups = expand(state, facts, options["dtype"], source, lost)
    if lost and options["dtype"] == torch.bfloat16:
        reasons = ", ".join(f"{count} {why}" for why, count in lost.items())
        warn_once(
            f"{source}: {lost.total()} layers are expanded to bf16, slower and larger ({reasons}). A checkpoint with "
            "equal groups of neighbouring inputs decodes from its own integers."
        )
    plain = copy.copy(config)
    del plain.quantization_config
    model_class = class_of(config)
    model, info = model_class.from_pretrained(None, config=plain, state_dict=state, output_loading_info=True, **options)
    model.config.quantization_config, model.config._name_or_path = facts, source
    try:
        model.generation_config = GenerationConfig.from_pretrained(source, **hub)
    except OSError:  # the file is missing, so the config's values are used
        pass
    layers = dict(model.named_modules())
    for name in groups.keys() & layers.keys():  # experts of a mixture are joined to one weight
        keep_quantized(layers[name], GroupedWeight(*groups[name]))
    return model, info


def _directory(source: str, hub: Mapping[str, Any]) -> Path:
    if os.path.isdir(source):
        return Path(source)
    options = {name: value for name, value in hub.items() if name not in ("subfolder", "proxies")}
    folder = hub.get("subfolder") or ""
    return Path(snapshot_download(source, allow_patterns=os.path.join(folder, "*.safetensors*"), **options)) / folder


def expand(
    state: dict[str, Tensor],
    facts: Mapping[str, Any],
    dtype: torch.dtype,
    source: str,
    lost: Counter[str] | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Replace the parts of quantised layers by their weights [out, in].

    Args:
        state: the checkpoint's tensors by name, changed in place.
        facts: the quantisation config.
        dtype: data type of the weights.
        source: name of the checkpoint in errors.
        lost: gets the number of other layers than those returned, by reason.

    Returns:
        Scales and zeros [out, groups] by layer, for layers whose groups are equally many neighbouring inputs.

    Raises:
        CheckpointError: a layer lacks parts, or their shapes do not fit.
    """
    groups = {}
    for layer in [key.removesuffix(".qweight") for key in state if key.endswith(".qweight")]:
        parts = {name: state.pop(f"{layer}.{name}", None) for name in _PARTS}
        fault = f"{source}: the parts of {layer} are missing or do not fit each other ({{why}}). Fetch it again."
        with foreign_errors(CheckpointError, fault):
            if lost_parts := [name for name in _PARTS[:3] if parts[name] is None]:
                raise ValueError(f"no {', '.join(lost_parts)}")
            codes, zeros, scales, group = _read(parts, facts)
            _check_zeros(zeros, facts, source)
            if len(scales) != len(zeros) or scales.shape != zeros.shape or codes.shape[1] != scales.shape[1]:
                raise ValueError(f"{list(codes.shape)}, {list(zeros.shape)}, {list(scales.shape)}")
            state[f"{layer}.weight"] = ((codes - zeros[group]) * scales[group]).t().to(dtype).contiguous()
        if torch.equal(group, torch.arange(len(codes)) // (len(codes) // len(scales))):
            groups[layer] = scales.t().contiguous(), zeros.t().contiguous()
        elif lost is not None:
            lost[_RAGGED if bool((group.diff() >= 0).all()) else _REORDERED] += 1
    return groups


def _read(parts: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [in, out], zeros and scales [groups, out] in fp32, and the group [in] of each input."""
    gptq, bits = facts["quant_method"] == "gptq", int(facts.get("bits", 4))
    natural = torch.arange(32 // bits) * bits
    shifts, most = natural if gptq else torch.tensor(_AWQ_ORDER) * bits, 2**bits - 1
    words, scales = parts["qweight"], parts["scales"].float()
    codes = (words[:, None] >> natural[:, None]).flatten(0, 1) if gptq else (words[..., None] >> shifts).flatten(1)
    zeros = (parts["qzeros"][..., None] >> shifts).flatten(1)
    if gptq and _form(facts) == "gptq":
        zeros = zeros + 1  # the first format stores one less
    group = _groups(parts["g_idx"], facts, len(codes), len(scales))
    return (codes & most).float(), (zeros & most).float(), scales, group


def _check_zeros(zeros: Tensor, facts: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError for symmetric GPTQ weights whose zeros are one off: those of the other format."""
    middle = 2 ** (int(facts.get("bits", 4)) - 1)
    if facts["quant_method"] == "gptq" and facts.get("sym") is True:
        for form, off in (("gptq_v2", 1), ("gptq", -1)):
            if bool((zeros == middle + off).all()):
                raise CheckpointError(
                    f"{source}: its weights are symmetric (sym), and their zeros are {middle + off}, not {middle}: set "
                    f'checkpoint_format in its quantization_config to "{form}".'
                )


def _groups(stored: Tensor | None, facts: Mapping[str, Any], inputs: int, groups: int) -> Tensor:
    """Return the group [in] of each input, as stored or by the config's size; the last group may be shorter.

    Raises ValueError: another number of groups than the config's size gives, or an input without a group.
    """
    if not groups:
        raise ValueError("no scales")
    size = None if facts.get("dynamic") else facts.get("group_size", facts.get("q_group_size"))
    if size is None:  # the config says nothing of this layer: equal groups
        size = inputs // groups if stored is not None or inputs % groups == 0 else 0
    elif is_whole(size, 1) and -(-inputs // int(size)) != groups or size == -1 and groups != 1:
        raise ValueError(f"groups of {size} among {inputs} inputs, but {groups} scales")
    size = inputs if size == -1 else size
    if not is_whole(size, 1):
        raise ValueError(f"group_size {size!r:.40} for {groups} groups of {inputs} inputs")
    if stored is None:
        return torch.arange(inputs) // size
    if len(stored) != inputs or not 0 <= int(stored.min()) <= int(stored.max()) < groups:
        raise ValueError(f"g_idx names groups from {int(stored.min())} to {int(stored.max())} of {groups}")
    return stored.long()
