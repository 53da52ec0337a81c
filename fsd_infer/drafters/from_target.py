"""Small models made from the target's own weights, without training, as in SWIFT (arXiv 2410.06916) and QuantSpec
(2502.10424).

"self:layers=0-9,20-29" is the target with these decoder layers only. "self:bits=3" is the target with linear weights
rounded to three bits. "self:layers=0-9,20-29:bits=3" is both.

A copy has its own module objects, so its layers can be left out and renumbered. Its only own weights are rounded ones;
embeddings, norms and LM head are the target's. Layers that a backend packed use the target's packed weights.

**Rounding by least squares.** In groups of 64 of an output's inputs, w ≈ z + s·n with whole n from 0 to 2^bits - 1.
Scale s and zero z minimise a group's squared error. From several starts (the range, shrunk by several factors), two
steps alternate: rounding n = round((w - z)/s), and linear regression of w on n. The best result wins. HQQ
(half-quadratic quantization) alternates in the same way but minimises another norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fsd_core.errors import FsdError, ModelLoadError
from fsd_core.registry import read_int
from fsd_infer.targets.stack import layer_list
from fsd_infer.targets.target import Target
from fsd_infer.targets.weights import replace_parameter, weight_rows

PREFIX = "self:"
MAX_LAYERS = 4096
_FORM = "write self:layers=0-9,20-29, self:bits=3 or self:layers=0-9,20-29:bits=3"
GROUP = 64
SHRINK_FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6)
ITERATIONS = 4
_BLOCK_SIZE = 2**19  # numbers per block, to fit a CPU's cache
_ROUTERS = ("gate", "router", "shared_expert_gate")  # of experts: small, and rounding must not change their choices

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class FromTarget:
    """How a small model is made from the target.

    Attributes:
        layers: indices of the decoder layers to keep; None: all.
        bits: to which linear weights in these layers are rounded; None: not rounded.
    """

    layers: tuple[int, ...] | None = None
    bits: int | None = None

    @classmethod
    def parse(cls, name: str) -> FromTarget:
        """Parse a name that begins with "self:". Raises FsdError for a malformed one."""
        options: dict[str, str] = {}
        for part in name.removeprefix(PREFIX).split(":"):
            key, _, value = part.partition("=")
            if key not in ("layers", "bits") or not value or key in options:
                raise FsdError(f"{name}: cannot use {part!r}; {_FORM}.")
            options[key] = value
        bits = None if "bits" not in options else read_int(options["bits"])
        if "bits" in options and (bits is None or not 2 <= bits <= 8):
            raise FsdError(f"{name}: bits must be a whole number from 2 to 8.")
        return cls(_numbers(name, options["layers"]) if "layers" in options else None, bits)

    def of(self, target: Target, name: str) -> Target:
        """Return the small model under the name ``name``.

        Raises:
            FsdError: a layer that the target lacks.
            ModelLoadError: a target whose layers cannot be left out or whose weights cannot be rounded.
        """
        model = target if self.layers is None else with_layers(target, self.layers, name)
        return model if self.bits is None else with_rounded_weights(model, self.bits, name)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse "0-9,20-29" to layers 0 to 9 and 20 to 29."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = [read_int(end) for end in part.split("-")]
        if None in ends or not 1 <= len(ends) <= 2 or not 0 <= ends[0] <= ends[-1] < MAX_LAYERS:  # type: ignore[operator]
            raise FsdError(f"{name}: {part!r} is neither a layer nor a range of layers; {_FORM}.")
        numbers += range(ends[0], ends[-1] + 1)  # type: ignore[operator, arg-type]
    _check_order(name, numbers)
    return tuple(numbers)


def _check_order(name: str, numbers: Sequence[int]) -> None:
    if not numbers or list(numbers) != sorted(set(numbers)):
        raise FsdError(f"{name}: give one layer or more, each once and in ascending order.")


def spelled(layers: tuple[int, ...]) -> str:
    """Return the name for these layers, such as "self:layers=0-2,5" for 0, 1, 2 and 5."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(layers), lambda at: at[1] - at[0])]
    ends = ((run[0], run[-1]) for run in runs)
    return f"{PREFIX}layers=" + ",".join(f"{low}-{high}" if low < high else str(low) for low, high in ends)


def with_layers(target: Target, numbers: Sequence[int], name: str) -> Target:
    """Return the target with only these decoder layers, counted from 0, in ascending order; no weights are copied.

    Raises:
        FsdError: no layers, a layer twice or out of order.
        ModelLoadError: there is no such layer, or the family's layers cannot be left out.
    """
    _check_order(name, numbers)
    target.layers(numbers)  # raises for unknown layers
    config, count = target.config, int(target.config.num_hidden_layers)
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ModelLoadError(f"{name}: layers of {config.model_type} depend on their numbers, so none can be left out.")
    model = _copy_of(target, name)
    text = model.config.get_text_config(decoder=True)
    for key, value in list(vars(text).items()):
        if "layer" in key and isinstance(value, (list, tuple)) and len(value) == count:
            setattr(text, key, [value[number] for number in numbers])
    text.num_hidden_layers = len(numbers)
    layers: Any = layer_list(model.get_decoder(), count)
    chosen = [layers[number] for number in numbers]
    layers._modules = {str(index): layer for index, layer in enumerate(chosen)}
    for index, layer in enumerate(chosen):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index
    return Target(model, target.tokenizer, name)


@torch.no_grad()
def with_rounded_weights(target: Target, bits: int, name: str) -> Target:
    """Return the target with the matrices of its decoder layers rounded by :func:`round_weight`.

    Norms, biases, routers of experts, embeddings and LM head stay.

    Raises ModelLoadError for weights that are quantised already, or sharded over processes.
    """
    if target.is_sharded or getattr(target.config, "quantization_config", None):
        raise ModelLoadError(f"{name}: {target.name} is quantised or sharded already; only whole weights are rounded.")
    model = _copy_of(target, name)
    for layer in layer_list(model.get_decoder(), int(target.config.num_hidden_layers)) or []:
        for path, module in layer.named_modules():
            if path.rpartition(".")[2] in _ROUTERS or "Router" in type(module).__name__:
                continue
            for key, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dim() >= 2:
                    weight: Tensor = weight_rows(module, None) if key == "weight" else parameter
                    replace_parameter(module, key, round_weight(weight.detach(), bits))
    return Target(model, target.tokenizer, name)


def _copy_of(target: Target, name: str) -> Any:
    """Copy the model's modules and config, but not its tensors."""
    if any("_hf_hook" in vars(module) for module in target.model.modules()):
        raise ModelLoadError(f"{name}: {target.name} was placed by accelerate's hooks; load it without device_map.")
    model = _shared(target.model)
    full_config, text_config = target.model.config, target.config
    config = deepcopy(full_config)
    new = {id(full_config): config, id(text_config): config.get_text_config(decoder=True)}
    for module in model.modules():
        if id(vars(module).get("config")) in new:
            vars(module)["config"] = new[id(vars(module)["config"])]
    return model


def _shared(module: M) -> M:
    """Copy a module tree: each copy has its own dicts of submodules, parameters, buffers and hooks."""
    copy = module.__new__(type(module))
    for key, value in vars(module).items():
        vars(copy)[key] = value.copy() if isinstance(value, dict) else value
    copy._modules = {name: None if part is None else _shared(part) for name, part in module._modules.items()}
    return copy


def round_weight(weight: Tensor, bits: int) -> Tensor:
    """Return the weight [..., in] with each group of inputs rounded to 2^bits values, in the same dtype."""
    width = weight.shape[-1]
    group = math.gcd(width, GROUP)
    groups = weight.reshape(-1, group if group >= GROUP // 4 else width)
    rounded = torch.empty_like(groups)
    for part, out in zip(
        *(tensor.split(max(_BLOCK_SIZE // groups.shape[1], 1)) for tensor in (groups, rounded)), strict=True
    ):
        out.copy_(_rounded(part.float(), 2**bits - 1))
    return rounded.view(weight.shape)


def _rounded(groups: Tensor, most: int) -> Tensor:
    """Round [G, n] in fp32, with n from 0 to ``most``."""
    low, high = (end[:, None] for end in groups.aminmax(dim=1))
    mean, least = groups.mean(1, keepdim=True), torch.finfo(torch.float32).tiny
    best, least_error = groups, torch.full_like(mean, math.inf)
    for shrunk in SHRINK_FACTORS:
        zero = (low + high) / 2 - shrunk * (high - low) / 2
        scale = (shrunk * (high - low) / most).clamp_min(least)
        for _ in range(ITERATIONS):
            numbers = ((groups - zero) / scale).round_().clamp_(0, most)
            centre = numbers.mean(1, keepdim=True)
            deviations = numbers - centre
            spread = deviations.square().sum(1, keepdim=True)
            slope = (deviations * (groups - mean)).sum(1, keepdim=True) / spread.clamp_min(least)
            scale = torch.where(spread > 0, slope, scale).clamp_min(least)
            zero = mean - scale * centre
        rounded = numbers * scale + zero
        error = (rounded - groups).square().sum(1, keepdim=True)
        best = torch.where(error < least_error, rounded, best)
        least_error = torch.minimum(least_error, error)
    return best
