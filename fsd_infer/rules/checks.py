"""Check what rules return: their code is the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_infer.trees.tree import DraftTree

# what values of a rule may be, of which only the device knows
RULE = "a rule's "
IS_NAN = RULE + "{} is NaN"
NO_NUMBERS = RULE + "log_r is NaN, +inf or all -inf"
NO_PROBABILITIES = RULE + "accept_prob is negative, NaN or more than 1 over a context's children"


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


def no_probabilities(accept_prob: Tensor, tree: DraftTree) -> Tensor:
    """[B, N] where the probability of a draft, or the sum over a context's children, lies outside [0, 1]."""
    accept_prob = accept_prob.masked_fill(~tree.is_draft, 0.0)
    over_children = torch.where(tree.is_child, accept_prob[:, None], 0.0).sum(-1)
    return ~(accept_prob >= 0) | ~(over_children <= 1 + 1e-3)
