"""The choice of a draft vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsd_infer.errors import DataError


def choose_draft_ids(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """Return ``always`` and the most frequent other ids, ascending, [Vd]; the smaller id wins a tie.

    Args:
        counts: [V] occurrences.
        size: Vd ≤ V.
        always: ids to include in any case.
    """
    if size > len(counts) or size < len(set(always)):
        raise DataError(f"draft_vocab_size is {size}; give {len(set(always))} (special tokens) to {len(counts)} (all).")
    ranked = counts.double()
    ranked[list(always)] = torch.inf
    order = torch.sort(ranked, descending=True, stable=True).indices
    return order[:size].sort().values
