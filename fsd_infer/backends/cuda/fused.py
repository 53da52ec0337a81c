"""Linear layers that read the same input, as one product over one tensor: their own weights become views of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def can_fuse(linears: Sequence[nn.Module]) -> bool:
    """Whether these are plain linear layers of one input width, dtype and device, with biases all or none."""
    parts = [part for part in linears if type(part) is nn.Linear and type(part.weight) is nn.Parameter]
    kinds = {
        (part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts
    }  # fmt: skip
    return len(parts) == len(linears) and len(kinds) == 1 and not any(part.weight.is_meta for part in parts)


def fused(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the weight [Σ out, in] and the bias [Σ out] of linear layers as one layer.

    The first call copies the weights into one tensor, of which the layers' own are views afterwards, so no weight is
    held twice. Later calls find them there, unless someone moved them in the meantime.
    """
    biases = [part.bias for part in linears if part.bias is not None]
    return _joined([part.weight for part in linears]), _joined(biases) if biases else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    first, length = parts[0], sum(len(part) for part in parts)
    if not _side_by_side(parts):
        with torch.inference_mode(False), torch.no_grad():
            joined = first.new_empty(length, *first.shape[1:])
            start = 0
            for part in parts:
                view = joined[start : start + len(part)]
                view.copy_(part)
                part.data = view
                start += len(part)
    return first.detach().as_strided((length, *first.shape[1:]), first.stride())


def _side_by_side(parts: Sequence[Tensor]) -> bool:
    storage = parts[0].untyped_storage().data_ptr()
    return all(part.is_contiguous() and part.untyped_storage().data_ptr() == storage for part in parts) and all(
        left.data_ptr() + left.nbytes == right.data_ptr() for left, right in pairwise(parts)
    )


def unfuse(linears: Sequence[nn.Linear]) -> None:
    """Give each layer memory of its own again."""
    for part in linears:
        for values in (part.weight, part.bias):
            if values is not None and values.untyped_storage().nbytes() > values.nbytes:
                values.data = values.data.clone()
