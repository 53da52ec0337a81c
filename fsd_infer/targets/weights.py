"""The weight that a layer computes with, asked of the layer: plain, sharded, quantised, adapted or packed by a backend.

Loaders leave weights of quantised files on the layers (:func:`keep_quantized`); a backend that reads them takes them
over when the model is prepared.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

ReadsBlocks = Callable[[int, int, int], bool]  # ggml's type, rows and columns of a weight -> whether a backend reads it
_TYPES = range(64)  # ggml's numbers of tensor types are less
_COMPUTED = "_computed_weight"  # attribute of a quantised layer
_QUANTIZED = "_quantized_weight"  # attribute of a layer


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight in the blocks of a quantised file. The layer has no other until a backend prepares it.

    Attributes:
        ggml_type: its tensor type, ggml's number.
        rows: [out, bytes] uint8, contiguous.
        order: [out] int64, the row of each output; None: the same order.
        name: what errors call it.
    """

    ggml_type: int
    rows: np.ndarray
    order: Tensor | None = None
    name: str = "a weight"


@dataclass(frozen=True)
class GroupedWeight:
    """How an expanded weight was quantised: it is scale · (code − zero), with whole codes.

    Attributes:
        scales, zeros: [out, groups] in fp32; groups are neighbouring inputs.
    """

    scales: Tensor
    zeros: Tensor


@cache
def warn_once(message: str) -> None:
    """Log a warning about what a user loses with these weights or on this machine, once per message."""
    logger.warning(message)


def readable_types(reads_blocks: ReadsBlocks | None) -> list[int]:
    """Return ggml's numbers of the tensor types that a backend reads; [] for None."""
    return [] if reads_blocks is None else [ggml_type for ggml_type in _TYPES if reads_blocks(ggml_type, 64, 256)]


def keep_quantized(layer: Any, weight: QuantizedWeight | GroupedWeight) -> nn.Parameter:
    """Leave a quantised weight on a layer, and return the layer's own.

    In place of a weight in blocks that is one of NaN without memory, so that nothing computes by it unnoticed.
    """
    vars(layer)[_QUANTIZED] = weight
    if isinstance(weight, QuantizedWeight):
        none = torch.full((), torch.nan, dtype=torch.bfloat16).expand(layer.weight.shape)
        layer.weight = nn.Parameter(none, requires_grad=False)
    parameter: nn.Parameter = layer.weight
    return parameter


def quantized_of(layer: nn.Module) -> QuantizedWeight | GroupedWeight | None:
    """Return what :func:`keep_quantized` left on a layer."""
    weight: QuantizedWeight | GroupedWeight | None = vars(layer).get(_QUANTIZED)
    return weight


def drop_quantized(layer: nn.Module) -> None:
    """Remove what :func:`keep_quantized` left on a layer."""
    vars(layer).pop(_QUANTIZED, None)


class PackedLayer(nn.Module):
    """A linear layer or embedding that computes by a weight in a backend's own layout.

    Its parameter ``weight`` is the plain one, or holds no numbers if that was freed: it is on "meta", or has no rows.

    Attributes:
        format: format of the weight: "bf16", "fp8" or "blocks", those of a quantised file.
    """

    format: str

    @abstractmethod
    def weight_rows(self, ids: Tensor | None) -> Tensor:
        """Return rows ids [...] of the weight in bf16, [..., in], or all of it, [out, in]."""

    @abstractmethod
    def become_plain(self, weight: Tensor) -> None:
        """Compute by this weight from now on, as the plain layer that it was."""

    @property
    def is_freed(self) -> bool:
        weight: Any = self.weight
        return bool(weight.is_meta or not len(weight))


def format_of(layer: nn.Module) -> str:
    """Return a packed layer's format, "" for others."""
    return layer.format if isinstance(layer, PackedLayer) else ""


def is_sharded(weight: Any) -> bool:
    """Return whether a weight is a DTensor, without importing its module, which takes a second."""
    return hasattr(weight, "full_tensor")


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer runs its class's forward with a plain weight, packed or not.

    A quantisation library has its own tensor types, its own layers, or replaced forwards. An adapter is a module
    around the layer, without a weight.
    """
    weight = layer._parameters.get("weight")
    return type(weight) is nn.Parameter and weight.is_floating_point() and "forward" not in vars(layer)


def stay_plain(layer: nn.Module) -> None:
    """Mark a layer whose weight other code reads, past its forward, so that no backend packs it."""
    vars(layer)["_fsd_stays_plain"] = True


def stays_plain(layer: nn.Module) -> bool:
    """Whether :func:`stay_plain` marked the layer."""
    return "_fsd_stays_plain" in vars(layer)


def weight_rows(layer: nn.Module, ids: Tensor | None) -> Tensor:
    """Return rows ids [K] of a linear layer's or embedding's weight, or all of it for None.

    A sharded weight (tensor parallelism) is gathered, so all processes must ask. For a layer that is quantised or has
    an adapter, this is the weight that the layer computes with.
    """
    weight: Tensor | None = getattr(layer, "weight", None)
    if weight is not None and is_sharded(weight):
        weight = weight.full_tensor()  # type: ignore[attr-defined]
    elif isinstance(layer, PackedLayer) and layer.is_freed:
        return layer.weight_rows(ids)
    elif weight is None or not is_plain(layer):
        if isinstance(layer, nn.Embedding):
            all_ids = torch.arange(shape_of(layer)[0], device=next(layer.parameters()).device)
            return layer(all_ids if ids is None else ids.to(all_ids.device))
        weight = _computed(layer)
    return weight if ids is None else weight[ids].contiguous()


def shape_of(layer: Any) -> tuple[int, int]:
    """Return (rows, columns) of the weight that a linear layer or embedding computes with."""
    weight = getattr(layer, "weight", None)
    if weight is not None and (is_plain(layer) or is_sharded(weight)) and len(weight):
        return int(weight.shape[0]), int(weight.shape[1])
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return int(layer.out_features), int(layer.in_features)


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter of a layer. A packed layer becomes plain."""
    if name == "weight" and isinstance(layer, PackedLayer):
        layer.become_plain(value)
    else:
        setattr(layer, name, nn.Parameter(value, requires_grad=False))


@torch.no_grad()
def _computed(layer: Any) -> Tensor:
    """Return the weight [out, in] that a layer computes with: its products with one-hot inputs, less its bias.

    A quantised layer keeps the result, because a drafter asks for other rows at every text.
    """
    cached: Tensor | None = vars(layer).get(_COMPUTED)
    if cached is not None:
        return cached
    parameter = next(iter(layer.parameters()))
    dtype = next((one.dtype for one in layer.parameters() if one.is_floating_point()), torch.float32)
    products = layer(torch.eye(shape_of(layer)[1], dtype=dtype, device=parameter.device))
    if layer.bias is not None:
        products = products - layer.bias
    weight = products.t().contiguous()
    if isinstance(layer, nn.Linear):  # others hold adapters, which change
        vars(layer)[_COMPUTED] = weight
    return weight
