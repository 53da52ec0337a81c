"""What `model.compile` compiles: decoder layers over packed sequences, and the losses' functions of rows.

torch.compile makes a kernel for each shape that it meets. A packed sequence has one length, and supervised rows are
padded to one of eight numbers (:func:`padded_count`), so few shapes occur. Attention stays as it is: FlexAttention
compiles itself, and masks keep the keys of earlier steps, so no shape in a layer depends on the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsd_train.losses import rows
from fsd_train.shapes import many_shapes

EIGHTHS = 8
_UNIT = 128  # where rows are long, the numbers are multiples: whole blocks of FlexAttention and of losses


def padded_count(count: int, length: int) -> int:
    """Round a number of rows up to the next eighth of the packed sequence's length, at least one eighth."""
    unit = _UNIT if length >= EIGHTHS * _UNIT else 1
    step = -(-length // (EIGHTHS * unit)) * unit
    return max(-(-count // step), 1) * step


class LayerCompiler:
    """Compiled forwards of modules, by module; a deep copy's modules get their own."""

    def __init__(self) -> None:
        self._forwards: dict[int, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCompiler:
        return LayerCompiler()

    @contextmanager
    def running(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Let these modules run compiled within the context. Others, in decoding or validation, stay as they are."""
        chosen = list(layers)
        for layer in chosen:
            if id(layer) not in self._forwards:
                self._forwards[id(layer)] = torch.compile(layer.forward, dynamic=False, backend=rows.BACKEND)
            vars(layer)["forward"] = self._forwards[id(layer)]
        try:
            with many_shapes():
                yield
        finally:
            for layer in chosen:
                del vars(layer)["forward"]
