"""Check what rules return: their code is the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import FsdError


def former_order(output: Any, where: str = "") -> FsdError:
    """Return the error for a distribution made with the former order of arguments: it would be p in silence."""
    return FsdError(
        f"{where}OutputDistribution takes inputs first now, not a {type(output.inputs).__name__}: write "
        "OutputDistribution(inputs, applies, logit_bias)."
    )


def not_bool(what: str, value: Any, shape: torch.Size) -> FsdError:
    """Return the error for anything but [B, N] bool."""
    return FsdError(f"{what} {described(value)}: give {tuple(shape)} bool (rows, nodes).")


def described(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.80}"
