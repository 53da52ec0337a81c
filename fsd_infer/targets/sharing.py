"""Models made of a target without training, which share its tensors: some of its layers, or all with rounded weights.

A copy has module objects of its own, so that its layers can be others or be counted anew, and no weights of its own but
those that are rounded: embeddings, norms and LM head are the target's. Packed linear layers (:mod:`fsd_infer.cpu`)
compute by the target's packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsd_infer.cpu import ops
from fsd_infer.errors import FsdError, ModelLoadError
from fsd_infer.targets.rounding import round_weight
from fsd_infer.targets.target import Target

M = TypeVar("M", bound=nn.Module)

_ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts: small, and what they choose must not change


def with_layers(target: Target, numbers: Sequence[int], name: str) -> Target:
    """The target with these decoder layers alone, counted from 0, in ascending order. Nothing is copied.

    Raises:
        FsdError: no layers, a layer twice or out of order.
        ModelLoadError: there is no such layer, or the family's layers cannot be left out.
    """
    if not numbers or list(numbers) != sorted(set(numbers)):
        raise FsdError(f"{name}: give one layer or more, each once and in ascending order.")
    target.layers(numbers)  # says which there are
    config, count = target.config, int(target.config.num_hidden_layers)
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ModelLoadError(f"{name}: layers of {config.model_type} depend on their numbers, so none can be left out.")
    model = _copy_of(target, name)
    text = model.config.get_text_config(decoder=True)
    for key, value in list(vars(text).items()):
        if "layer" in key and isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, key, [value[number] for number in numbers])
    text.num_hidden_layers = len(numbers)
    found = _layer_list(model.get_decoder(), count)
    kept = [found[number] for number in numbers]
    found._modules = {str(place): layer for place, layer in enumerate(kept)}
    for place, layer in enumerate(kept):
        for part in layer.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.layer_idx = place  # type: ignore[assignment]
    return Target(model, target.tokenizer, name)


def with_rounded_weights(target: Target, bits: int, name: str) -> Target:
    """The target with the weights of its decoder layers rounded (:func:`round_weight`); norms, biases, routers of
    experts, embeddings and LM head stay.

    Raises:
        FsdError: bits out of range.
        ModelLoadError: weights that are quantised already, or shared out over processes.
    """
    if not 2 <= bits <= 8:
        raise FsdError(f"{name}: bits go from 2 to 8.")
    if target.is_shared_out or getattr(target.config, "quantization_config", None):
        raise ModelLoadError(
            f"{name}: {target.name} is quantised or shared out already; only whole weights are rounded."
        )
    model = _copy_of(target, name)
    for layer in _layer_list(model.get_decoder(), int(target.config.num_hidden_layers)):
        for path, part in layer.named_modules():
            if path.rpartition(".")[2] not in _ROUTERS and "Router" not in type(part).__name__:
                _round(part, bits)
    return Target(model, target.tokenizer, name)


@torch.no_grad()
def _round(part: nn.Module, bits: int) -> None:
    """Round a copied module's own matrices."""
    for key, parameter in list(part.named_parameters(recurse=False)):
        if parameter.dim() < 2:
            continue
        weight: Tensor = ops.weight_rows(part, None) if key == "weight" else parameter
        ops.replace_parameter(part, key, round_weight(weight.detach(), bits))


def _copy_of(target: Target, name: str) -> Any:
    """The model with modules and a config of its own, and with the target's tensors."""
    if any("_hf_hook" in vars(part) for part in target.model.modules()):
        raise ModelLoadError(f"{name}: {target.name} was placed by accelerate's hooks; load it without device_map.")
    model = _shared(target.model)
    ops.forget_stacks(model)
    whole, text = target.model.config, target.config
    config = deepcopy(whole)
    new = {id(whole): config, id(text): config.get_text_config(decoder=True)}
    for part in model.modules():
        if id(vars(part).get("config")) in new:
            vars(part)["config"] = new[id(vars(part)["config"])]
    return model


def _shared(module: M) -> M:
    """A module of the same parts, whose lists of parts, parameters, buffers and hooks are its own."""
    made = module.__new__(type(module))
    for key, value in vars(module).items():
        vars(made)[key] = value.copy() if isinstance(value, dict) else value
    made._modules = {name: None if part is None else _shared(part) for name, part in module._modules.items()}
    return made


def _layer_list(decoder: nn.Module, count: int) -> nn.ModuleList:
    """As :meth:`Target.layers` finds it."""
    return next(part for part in decoder.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
