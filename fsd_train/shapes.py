"""How many shapes torch.compile makes kernels for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

SHAPES = 64  # most kernels of one function


def many_shapes() -> AbstractContextManager[Any]:
    """Let torch.compile make kernels for more than its usual eight shapes of a function, after which it makes none."""
    return torch._dynamo.config.patch(recompile_limit=SHAPES)
