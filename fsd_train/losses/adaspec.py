"""AdaSPEC (arXiv 2510.19779): training on tokens chosen with a reference drafter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_train.losses.base import (
    LOSSES,
    DraftBatch,
    Loss,
    LossIndex,
    LossOutput,
    Schedule,
    as_loss,
    batch_mean,
    reference_of,
)
from fsd_train.losses.rows import RowFunction, chunked_rows, divergence_rows
from fsd_train.types import PositiveInt, Share


def largest(values: Tensor, rows: LossIndex, keep: float) -> Tensor:
    """Mark the rows with the largest values of their step.

    Args:
        values: [R].
        rows: the rows; padding is never marked.
        keep: share of each step's rows, in (0, 1], rounded up to whole rows.

    Returns:
        [R] bool.
    """
    # by step, each step's largest values first; counts stay on the device, which nothing waits for
    order = values.masked_fill(~rows.counted, -torch.inf).argsort(descending=True, stable=True)
    order = order[rows.step[order].argsort(stable=True)]  # [R]
    counts = rows.sum_by_step(torch.ones_like(values, dtype=torch.float64))  # [S]
    kept_counts = (keep * rows.sum_by_step(rows.counted.to(counts.dtype)) - 1e-9).ceil()  # [S]
    offsets = counts.cumsum(0) - counts  # of each step in the order: [S]
    step = rows.step[order]
    ranks = torch.arange(len(order), device=values.device) - offsets[step]  # within the step: [R]
    return torch.zeros_like(values, dtype=torch.bool).index_copy(0, order, ranks < kept_counts[step])


@LOSSES.register("adaspec")
class AdaSpecLoss(Loss):
    """Another loss on the share ``keep`` of tokens with the largest gap Δ = D(p, q) − D(p, q_ref).

    q_ref is the distribution of a frozen reference drafter at the same row. A large gap marks a token that such a
    drafter can fit and this one does not yet. In the paper D is KL(p||q), and the reference has the same size and was
    distilled from the same target on all tokens.

    Each batch chooses its own tokens, separately for each chain step. In validation the batch has no reference and all
    tokens count.

    Args:
        reference: directory of an exported head of the same target, or of a small LM for
            :class:`fsd_train.models.lm.LMModule`. A head shares the inputs and LM head rows of the trained head, so its
            own draft vocabulary does not matter.
        keep: share of tokens, in (0, 1], or a :class:`fsd_train.losses.base.Schedule`.
        loss: loss on the chosen tokens.
        divergence: D, a name of :mod:`fsd_core.divergence`.
        chunk_size: memory bound of the gap in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    def __init__(
        self,
        reference: str,
        keep: Share | Schedule = 0.4,
        loss: Loss | str = "kl_pq",
        divergence: str = "kl_pq",
        chunk_size: PositiveInt | None = None,
    ) -> None:
        if not reference:
            raise DataError("adaspec: reference is empty; name the directory of an exported head or small LM.")
        self.keep = Schedule.of(keep)
        if not all(0 < value <= 1 for value in (self.keep.start, self.keep.end)):
            raise DataError(f"adaspec: keep is {keep!r}; give a share of the tokens above 0 and up to 1.")
        self.reference = reference
        self.inner = as_loss(loss)
        self.parts = [self.inner]
        if reference_of(self.inner) is not None:
            raise DataError("adaspec: the inner loss is adaspec too; choose another loss.")
        if self.inner.couples_rows:
            raise DataError(
                "adaspec: fsd needs whole chains, which a choice of single tokens breaks; use a mix of both."
            )
        self.chunk_size = chunk_size
        self._rows = RowFunction.of_one(divergence_rows(divergence))

    def __call__(self, batch: DraftBatch) -> LossOutput:
        if batch.reference is None:
            return self.inner(batch)
        gap = self.gap(batch)
        chosen = largest(gap, batch.rows, self.keep.at(batch.progress, batch.step))
        chosen_batch = batch.only(chosen)
        out = self.inner(chosen_batch)
        out.parts["gap"] = batch_mean(gap, batch.rows)
        out.parts["gap_kept"] = batch_mean(gap, chosen_batch.rows)
        return out

    @torch.no_grad()
    def gap(self, batch: DraftBatch) -> Tensor:
        """Return Δ at every row, [R] fp32."""
        assert batch.reference is not None
        reference = replace(batch, estimates=batch.reference.to(batch.estimates.dtype))
        own_values, _ = chunked_rows(self._rows, batch, self.chunk_size)  # D(p, q): [1, R]
        reference_values, _ = chunked_rows(self._rows, reference, self.chunk_size)  # D(p, q_ref): [1, R]
        return own_values[0] - reference_values[0]
