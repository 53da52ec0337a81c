"""Which of the target's tokens a head drafts over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsd_infer.errors import DataError


def choose_draft_ids(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The ``size`` most frequent ids (ties: the smaller id), among them all of ``always``; ascending.

    Args:
        counts: [V] occurrences.
        size: Vd ≤ V.
        always: ids that must be there.
    """
    if size > len(counts) or size < len(set(always)):
        raise DataError(
            f"draft_vocab_size is {size}; it must be {len(set(always))} (special tokens) to {len(counts)} (all)."
        )
    ranked = counts.double()
    ranked[list(always)] = torch.inf
    order = torch.sort(ranked, descending=True, stable=True).indices
    return order[:size].sort().values
