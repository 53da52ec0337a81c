"""Metrics of a draft head, teacher-forced: they need no decoding and run on validation batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fsd_train.losses.base import DraftBatch, LMHead


@torch.no_grad()
def greedy_agreement(batch: DraftBatch, full_head: LMHead, draft_ids: Tensor | None, chunk_size: int = 128) -> Tensor:
    """Where the drafter's most likely token is the target's most likely one in its whole vocabulary.

    Args:
        batch: estimates [S, N, H] and features [N, H].
        full_head: the target's whole LM head.
        draft_ids: [Vd] target id of each draft vocabulary entry; None if the draft vocabulary is the target's.
        chunk_size: rows whose [V] logits are alive at a time.

    Returns:
        [S, N] bool.
    """
    steps, rows = batch.estimates.shape[:2]
    agree = torch.empty(steps, rows, dtype=torch.bool, device=batch.features.device)
    for start in range(0, rows, chunk_size):
        piece = slice(start, start + chunk_size)
        best = full_head(batch.features[piece]).argmax(-1)
        drafted = batch.head(batch.estimates[:, piece]).argmax(-1)
        agree[:, piece] = (drafted if draft_ids is None else draft_ids[drafted]) == best
    return agree


class StepAgreement(Metric):
    """Share of supervised rows where drafter and target have the same most likely token, for each unrolled step."""

    hits: Tensor
    rows: Tensor

    def __init__(self, steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("hits", torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros(steps, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, agree: Tensor, weights: Tensor) -> None:
        """agree [S, N] bool, weights [S, N] (0: not supervised)."""
        counted = weights > 0
        self.hits += (agree & counted).sum(1)
        self.rows += counted.sum(1)

    def compute(self) -> Tensor:
        """[S], NaN for a step that was never supervised."""
        return self.hits / self.rows


class ChainLength(Metric):
    """Expected accepted length of a greedy chain, 1 + Σ_{k=1…S} Π_{s<k} a_s, teacher-forced.

    a_s is 1 where step s of the chain agrees with the target at its own position; the leading 1 is the target's own
    token. Averaged over the roots whose S steps are all supervised.
    """

    total: Tensor
    roots: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("roots", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, agree: Tensor, weights: Tensor, positions: Tensor) -> None:
        """agree [S, N] bool, weights [S, N], positions [N] flat positions (distinct)."""
        steps = agree.shape[0]
        if not positions.numel():
            return
        size = int(positions.max()) + steps
        dense = torch.zeros(2, steps, size, dtype=torch.bool, device=agree.device)
        dense[0, :, positions] = agree
        dense[1, :, positions] = weights > 0
        alive = torch.ones_like(positions, dtype=torch.bool)
        length = torch.ones_like(positions)
        for step in range(steps):  # a root's step s stands s positions later
            alive = alive & dense[0, step, positions + step]
            length += alive
        whole = dense[1, steps - 1, positions + steps - 1]
        self.total += length[whole].sum()
        self.roots += whole.sum()

    def compute(self) -> Tensor:
        """Scalar, NaN if no chain was long enough."""
        return self.total / self.roots
