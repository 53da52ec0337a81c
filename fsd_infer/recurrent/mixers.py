"""Recurrent layers of transformers that read draft trees, found by the functions that their code calls.

A layer's own forward projects, normalises and gates. In between it calls a causal convolution and a scan, which assume
that tokens follow each other. With our cache it runs as it is, with functions in their place that know the tree. With
any other cache, or none, nothing changes: training, and transformers' ``generate``, do as before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsd_core.errors import ModelLoadError
from fsd_infer.device.cache import SlotCache, cache_argument
from fsd_infer.device.states import Inputs, Recurrence, RecurrentStates
from fsd_infer.recurrent.recurrences import Convolution, DeltaRule, Duality, Selective

STATE_KEEPERS = ("update_conv_state", "update_recurrent_state", "get_linear_cache")  # what code with a state calls

SMALL_STEP = 1e-3  # a limit below which steps change next to nothing; Nemotron-H and Zamba2 have it


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that keep a state in its cache, by name."""
    parts = dict(model.named_modules())
    keeping = {kind for kind in {type(part) for part in parts.values()} if any(_methods(kind))}
    return {name: part for name, part in parts.items() if type(part) in keeping}


def read_trees(model: nn.Module) -> bool:
    """Let the recurrent layers of a model read draft trees; return whether it has any.

    Raises:
        ModelLoadError: a layer keeps a state that no code here can verify trees with, or one whose distribution depends
            on where a prompt ends.
    """
    layers = recurrent_layers(model)
    for name, layer in layers.items():
        layer_class = type(layer)
        if issubclass(layer_class, TreeReader):
            continue
        names = {method.__name__ for method in _methods(layer_class)}
        if names != {"forward"} or not _is_known(_code_of(layer_class.forward)):
            raise ModelLoadError(
                f"{type(model).__name__} has layers of type {layer_class.__name__}, which keep a state of their own; "
                "verifying a token tree needs their recurrence. Use another target."
            )
        _check_steps(model, layer)
        layer.__class__ = _reader_of(layer_class)  # type: ignore[arg-type]
        layer._fsd_name = name  # type: ignore[assignment]
    return bool(layers)


def read_past_forward(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers whose weights Mamba multiplies by itself, past their forwards."""
    steps = (getattr(layer, "dt_proj", None) for layer in recurrent_layers(model).values())
    return [layer for layer in steps if isinstance(layer, nn.Linear)]


def _check_steps(model: nn.Module, layer: Any) -> None:
    """Raise ModelLoadError for limits that transformers applies to the steps of a prompt, and not to later ones."""
    low, high = getattr(layer, "time_step_limit", None) or (0.0, math.inf)
    if low > SMALL_STEP or high < math.inf:
        raise ModelLoadError(
            f"{type(model).__name__} limits its time steps to ({low:g}, {high:g}), which transformers applies to "
            "prompts and not to the tokens that it generates, so answers depend on where a prompt ends. Set "
            "time_step_limit (or time_step_min) in config.json to 0 and no upper limit, or use another target."
        )


class TreeReader:
    """Mixed into the class of a recurrent layer by :func:`read_trees`."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickled models read trees, too, though their class is made at run time."""
        return _bare_reader, (type(self).__mro__[2],), vars(self)


def _bare_reader(layer_class: type[nn.Module]) -> Any:
    return object.__new__(_reader_of(layer_class))  # type: ignore[arg-type]


@cache
def _reader_of(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a layer's class that reads trees from a :class:`.SlotCache`."""
    inner, argument = _code_of(layer_class.forward), cache_argument(layer_class)
    replaced = {name: FUNCTIONS[name] for name in inner.__code__.co_names if name in FUNCTIONS}

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        cache = options.get(argument)
        if not isinstance(cache, SlotCache):
            return layer_class.forward(self, hidden_states, *args, **options)
        call = _Call(cache.recurrent, self._fsd_name)
        ours = {name: partial(function, call) for name, function in replaced.items()}
        run = FunctionType(inner.__code__, {**inner.__globals__, **ours}, None, inner.__defaults__, inner.__closure__)
        return run(self, hidden_states, *args, **{**options, argument: call, "attention_mask": None})

    members = {"forward": forward, "__module__": layer_class.__module__, "__qualname__": layer_class.__qualname__}
    return type(layer_class.__name__, (TreeReader, layer_class), members)


class _Call:
    """Stands in for the cache in one forward of a layer. The layer sees a text without a past, so that it calls the
    functions for many tokens, which continue the real text.
    """

    def __init__(self, states: RecurrentStates, name: str) -> None:
        self.states, self.name, self.count = states, name, 0

    def run(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Run a recurrence of the layer, which may have several, in the order of its code."""
        self.count += 1
        return self.states.run((self.name, self.count), recurrence, inputs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return inputs

    def update_recurrent_state(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return state


def convolve(
    call: _Call, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """causal_conv1d_fn: x [B, C, M] -> [B, C, M]."""
    return call.run(Convolution(weight, bias, activation), (x.transpose(1, 2),)).transpose(1, 2)


def duality(
    call: _Call,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """mamba2_chunk_scan: x [B, M, H, P], dt [B, M, H], A [H], B and C [B, M, G, N], D [H] -> y [B, M, H, P]."""
    dt = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    inputs = tuple(map(_wide, (A * dt, x * dt[..., None], B, C)))
    y = call.run(Duality(), inputs)
    return _gated(y if D is None else y + x * D[..., None], z).contiguous(), y


def selective(
    call: _Call,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """mamba_selective_scan: x, dt and z [B, C, M], A [C, N], B and C [B, N, M], D [C] -> y [B, C, M]."""
    dt = _steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    y = call.run(Selective(_wide(A)), tuple(map(_wide, (dt, *(part.transpose(1, 2) for part in (x, B, C))))))
    y = y.transpose(1, 2)
    return _gated(y if D is None else y + x * D[:, None], z), y


def delta(
    call: _Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """torch_chunk_gated_delta_rule, chunk_kimi_delta_attention: query and key [B, M, H', K], H' a divisor of H, value
    [B, M, H, V], beta [B, M, H], g [B, M, H] or [B, M, H, K] -> y [B, M, H, V].
    """
    q, k, v, g, beta = map(_wide, (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, k))
    y = call.run(DeltaRule(), (q, k, v, g if g.dim() == 4 else g[..., None], beta))
    return y.to(value.dtype, memory_format=torch.contiguous_format), y


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve, "mamba2_chunk_scan": duality, "mamba_selective_scan": selective,
    "torch_chunk_gated_delta_rule": delta, "chunk_kimi_delta_attention": delta,
}  # fmt: skip


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else y * F.silu(z)


def _wide(x: Tensor) -> Tensor:
    """States are kept in fp32 at least, as in transformers."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _code_of(function: Callable[..., Any]) -> FunctionType:
    code = inspect.unwrap(function)
    assert isinstance(code, FunctionType)
    return code


def _methods(layer_class: type) -> Iterator[FunctionType]:
    """Yield the functions of a class whose code keeps a state."""
    for base in layer_class.__mro__:
        for member in vars(base).values():
            if inspect.isfunction(member) and set(STATE_KEEPERS) & set(_code_of(member).__code__.co_names):
                yield _code_of(member)


def _is_known(forward: FunctionType) -> bool:
    """Whether a layer's forward leaves its states to functions that are known here."""
    names = set(forward.__code__.co_names)
    convolves, scans = "causal_conv1d_fn" in names, len(names & FUNCTIONS.keys() - {"causal_conv1d_fn"}) > 0
    keeps = tuple(name in names for name in STATE_KEEPERS)
    return keeps == (convolves, scans, False)
