"""Convert the weights of quantisation libraries to blocks that our kernels read.

A library stores a weight as small integers with a scale per row, or per row and group of columns. If the quantisation
is symmetric and groups are multiples of 32 columns, the weight equals ggml's Q8_0 or Q4_0 with equal scales in
neighbouring blocks. Scales are rounded to fp16, a relative error of at most 1/4096. For comparison, bf16 products round
by 1/512.

Layers are recognised by the names of their classes, so no library is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_RUN = 32  # integers that share a scale in Q8_0 and Q4_0
_Q4_0, _Q8_0 = 2, 8  # ggml's tensor types
_SMALLEST = 2.0**-14  # smallest normal fp16


@dataclass(frozen=True)
class Blocks:
    """A weight in the blocks of a quantised file.

    Attributes:
        kind: ggml's tensor type.
        rows: [out, bytes] uint8, contiguous.
        order: [out] int64, the row of each output; None: the same order.
    """

    kind: int
    rows: np.ndarray
    order: Tensor | None = None


def blocks_of(layer: nn.Module) -> Blocks | None:
    """Return the blocks of a quantised linear layer.

    Args:
        layer: quantised by torchao, quanto or compressed-tensors, with weights only and no quantised inputs.

    Returns:
        The blocks. None for other layers, asymmetric quantisation, groups that are no multiple of 32 columns, and
        scales outside the normal range of fp16.
    """
    found = _codes_of(layer)
    if found is None:
        return None
    codes, scales = found
    columns = codes.shape[1]
    if columns % (_RUN * scales.shape[1]) or codes.shape[0] != scales.shape[0]:
        return None
    halves = scales.detach().half()
    if not bool(((halves.abs() >= _SMALLEST) & halves.isfinite()).all()):
        return None
    halves = halves.repeat_interleave(columns // _RUN // scales.shape[1], 1)
    narrow = bool((codes.amin() >= -8) & (codes.amax() <= 7))
    return Blocks(_Q4_0 if narrow else _Q8_0, _records(codes, halves, narrow))


def _codes_of(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return a layer's integers [out, in] in int8 and scales [out, groups], or None."""
    weight: Any = layer._parameters.get("weight")
    kind = type(weight).__name__
    if kind == "Int8Tensor":  # torchao
        found = weight.qdata, weight.scale, weight.zero_point if weight.act_quant_kwargs is None else None
    elif kind == "IntxUnpackedToInt8Tensor":  # torchao
        found = weight.qdata, weight.scale, weight.zero_point if weight.activation_quantization is None else None
    elif kind == "WeightQBytesTensor" and weight.activation_qtype is None:  # quanto
        found = weight._data, weight._scale, torch.zeros(1)
    else:
        return _decompressed(layer)
    codes, scales, zero = found
    if codes.dtype != torch.int8 or zero is None or bool(zero.any()):
        return None
    return codes, scales


def _decompressed(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Do the same for a layer of compressed-tensors, which holds its weight in bf16 after its first forward."""
    scheme, scales = getattr(layer, "quantization_scheme", None), layer._parameters.get("weight_scale")
    weight, own = layer._parameters.get("weight"), getattr(scheme, "weights", None)
    if weight is None or scales is None or own is None or getattr(scheme, "input_activations", None) is not None:
        return None
    if getattr(own, "type", None) != "int" or not getattr(own, "symmetric", False) or scales.dim() != 2:
        return None
    if weight.is_meta or not weight.is_floating_point() or weight.shape[1] % scales.shape[1]:
        return None
    groups = weight.detach().float().unflatten(1, (scales.shape[1], -1))
    return (groups / scales.detach().float()[..., None]).round().clamp(-128, 127).to(torch.int8).flatten(1), scales


def _records(codes: Tensor, halves: Tensor, narrow: bool) -> np.ndarray:
    """Return rows [out, bytes] in ggml's layout: for every 32 integers a scale in fp16, then the integers."""
    numbers = codes.contiguous().numpy().reshape(len(codes), -1, _RUN)
    if narrow:
        shifted = (numbers + 8).astype(np.uint8)
        numbers = shifted[..., : _RUN // 2] | shifted[..., _RUN // 2 :] << 4
    scales = halves.contiguous().numpy().view(np.uint8).reshape(*halves.shape, 2)
    return np.concatenate([scales, numbers.view(np.uint8)], -1).reshape(len(codes), -1)
