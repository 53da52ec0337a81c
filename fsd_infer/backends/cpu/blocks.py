"""Convert the weights of quantisation libraries to blocks that our kernels read.

A library stores a weight as small integers with a scale per row, or per row and group of columns. If the quantisation
is symmetric and groups are multiples of 32 columns, the weight equals ggml's Q8_0 or Q4_0 with equal scales in
neighbouring blocks. A weight of four bits with zeros equals Q4_1. Scales are rounded to fp16, a relative error of at
most 1/4096. For comparison, bf16 products round by 1/512.

Layers are recognised by the names of their classes, so no library is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fsd_infer.targets.weights import GroupedWeight, QuantizedWeight, quantized_of

_RUN = 32  # integers that share a scale
_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8  # ggml's tensor types
_SMALLEST = 2.0**-14  # smallest normal fp16


def blocks_of(layer: nn.Module) -> QuantizedWeight | None:
    """Return the blocks of a quantised linear layer.

    Args:
        layer: quantised by torchao, quanto, compressed-tensors, GPTQ or AWQ, with weights only and no quantised inputs.

    Returns:
        The blocks. None for other layers, zeros of more than four bits, groups that are not a multiple of 32 columns,
        and scales outside the normal range of fp16.
    """
    stored = _codes_of(layer)
    if stored is None:
        return None
    codes, scales, zeros = stored
    columns = codes.shape[1]
    if columns % (_RUN * scales.shape[1]) or codes.shape[0] != scales.shape[0]:
        return None
    halves = scales.detach().half()
    if not bool(((halves.abs() >= _SMALLEST) & halves.isfinite()).all()):
        return None
    repeats = columns // _RUN // scales.shape[1]
    if zeros is not None:
        least = (-zeros * halves.float()).half()
        both = torch.stack([halves, least], -1).repeat_interleave(repeats, 1)
        return QuantizedWeight(_Q4_1, _records(codes, both, 0))
    narrow = bool((codes.amin() >= -8) & (codes.amax() <= 7))
    records = _records(codes, halves.repeat_interleave(repeats, 1), 8 if narrow else None)
    return QuantizedWeight(_Q4_0 if narrow else _Q8_0, records)


def _codes_of(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return a layer's integers [out, in] in int8, scales [out, groups], and zeros if they differ; or None."""
    weight: Any = layer._parameters.get("weight")
    stored = quantized_of(layer)
    if isinstance(stored, GroupedWeight):
        return _grouped(weight, stored.scales, stored.zeros)
    type_name = type(weight).__name__
    if type_name == "Int8Tensor":  # torchao
        parts = weight.qdata, weight.scale, weight.zero_point if weight.act_quant_kwargs is None else None
    elif type_name == "IntxUnpackedToInt8Tensor":  # torchao
        parts = weight.qdata, weight.scale, weight.zero_point if weight.activation_quantization is None else None
    elif type_name == "WeightQBytesTensor" and weight.activation_qtype is None:  # quanto
        parts = weight._data, weight._scale, torch.zeros(1)
    else:
        return _decompressed(layer)
    codes, scales, zero = parts
    if codes.dtype != torch.int8 or zero is None or bool(zero.any()):
        return None
    return codes, scales, None


def _grouped(weight: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Do the same for an expanded weight, whose codes are exact in bf16 up to 128 steps from their zero."""
    steps = _steps(weight, scales)
    zero = zeros.flatten()[0]
    if bool((zeros == zero).all()) and float(zero) in (8.0, 128.0):
        return _in_int8(steps), scales, None
    codes = steps + zeros[..., None]
    return (codes.to(torch.int8).flatten(1), scales, zeros) if bool(((codes >= 0) & (codes < 16)).all()) else None


def _decompressed(layer: nn.Module) -> tuple[Tensor, Tensor, None] | None:
    """Do the same for a layer of compressed-tensors, which holds its weight in bf16 after its first forward."""
    scheme, scales = getattr(layer, "quantization_scheme", None), layer._parameters.get("weight_scale")
    weight, arguments = layer._parameters.get("weight"), getattr(scheme, "weights", None)
    if weight is None or scales is None or arguments is None or getattr(scheme, "input_activations", None) is not None:
        return None
    if getattr(arguments, "type", None) != "int" or not getattr(arguments, "symmetric", False) or scales.dim() != 2:
        return None
    if weight.is_meta or not weight.is_floating_point() or weight.shape[1] % scales.shape[1]:
        return None
    return _in_int8(_steps(weight, scales)), scales, None


def _steps(weight: Tensor, scales: Tensor) -> Tensor:
    """Return an expanded weight [out, in] in whole steps of its scales [out, groups]: [out, groups, in / groups]."""
    groups = weight.detach().float().unflatten(1, (scales.shape[1], -1))
    return (groups / scales.detach().float()[..., None]).round()


def _in_int8(steps: Tensor) -> Tensor:
    return steps.clamp(-128, 127).to(torch.int8).flatten(1)


def _records(codes: Tensor, halves: Tensor, shift: int | None) -> np.ndarray:
    """Return rows [out, bytes] in ggml's layout: for every 32 integers the numbers in fp16, then the integers.

    Args:
        codes: [out, in].
        halves: [out, in / 32] scales in fp16, or [out, in / 32, 2] with each run's least number.
        shift: added to integers of four bits; None: they have eight.
    """
    numbers = codes.contiguous().numpy().reshape(len(codes), -1, _RUN)
    if shift is not None:
        shifted = (numbers + shift).astype(np.uint8)
        numbers = shifted[..., : _RUN // 2] | shifted[..., _RUN // 2 :] << 4
    scales = halves.contiguous().numpy().view(np.uint8).reshape(*halves.shape[:2], -1)
    return np.concatenate([scales, numbers.view(np.uint8)], -1).reshape(len(codes), -1)
