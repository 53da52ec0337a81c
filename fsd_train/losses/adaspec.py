"""Training on the tokens that a reference drafter shows to be worth it: AdaSPEC (arXiv 2510.19779)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fsd_infer.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, Loss, LossOutput, Rows, as_loss, reference_of, weighted_mean
from fsd_train.losses.rows import RowFunction, chunked_rows, divergence_rows
from fsd_train.losses.schedule import Schedule
from fsd_train.types import PositiveInt, Share


def largest(values: Tensor, rows: Rows, keep: float) -> Tensor:
    """Which rows have the largest values of their step.

    Args:
        values: [R].
        rows: their steps.
        keep: share of each step's rows, in (0, 1]; rounded up to whole rows.

    Returns:
        [R] bool.
    """
    chosen = torch.zeros_like(values, dtype=torch.bool)
    for step in range(len(rows.chains)):
        here = (rows.step == step).nonzero().squeeze(1)
        count = math.ceil(keep * len(here) - 1e-9)
        chosen[here[values[here].topk(count).indices]] = True
    return chosen


@LOSSES.register("adaspec")
class AdaSpecLoss(Loss):
    """Another loss on the share k of tokens with the largest gap Δ = D(p, q) − D(p, q_ref).

    q_ref is a frozen reference drafter's distribution at the same row, and D is KL(p||q) (``kl_pq``) in the paper.
    A large gap marks a token that a drafter of this kind can fit and this one does not yet; where both fail alike,
    the target is out of reach and the token is left out. The paper's reference is a drafter of the same size, distilled
    beforehand from the same target on all tokens.

    Tokens are chosen afresh in every batch, among those supervised and for each unrolled step on its own. Without a
    reference in the batch, as in validation, all tokens count.

    Args:
        reference: directory of an exported head of the same target, or of a small LM where one is trained
            (:class:`fsd_train.models.lm.LMModule`). A head reads what the trained head reads, and its estimates go
            through the same rows of the LM head, so its own draft vocabulary does not matter.
        keep: k, a number in (0, 1] or a schedule (see :class:`fsd_train.losses.schedule.Schedule`).
        loss: the loss on the chosen tokens.
        divergence: D, a name of :mod:`fsd_infer.divergence`.
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
            raise DataError("adaspec: reference must name the directory of an exported head or small LM.")
        self.keep = Schedule.of(keep)
        if not all(0 < value <= 1 for value in (self.keep.start, self.keep.end)):
            raise DataError(f"adaspec: keep is a share of the tokens, above 0 and up to 1, got {keep!r}.")
        self.reference = reference
        self.inner = as_loss(loss)
        self.parts = [self.inner]
        if reference_of(self.inner) is not None:
            raise DataError("adaspec: the loss on the chosen tokens must not choose tokens itself.")
        if self.inner.couples_rows:
            raise DataError(
                "adaspec: fsd needs whole chains, which a choice of single tokens breaks; put both in a mix instead."
            )
        self.chunk_size = chunk_size
        rows = divergence_rows(divergence)
        self._rows = RowFunction(lambda log_p, log_q: rows(log_p, log_q)[None])

    def __call__(self, batch: DraftBatch) -> LossOutput:
        if batch.reference is None:
            return self.inner(batch)
        gap = self.gap(batch)
        chosen = largest(gap, batch.rows, self.keep.at(batch.progress, batch.step))
        kept = batch.with_weights(batch.weights * chosen)
        out = self.inner(kept)
        out.parts["gap"] = weighted_mean(gap, batch.weights)
        out.parts["gap_kept"] = weighted_mean(gap, kept.weights)
        return out

    @torch.no_grad()
    def gap(self, batch: DraftBatch) -> Tensor:
        """Δ at every row, [R] fp32."""
        assert batch.reference is not None
        pair = (batch.estimates, batch.reference.to(batch.estimates.dtype))
        own, reference = (
            chunked_rows(self._rows, replace(batch, estimates=each), self.chunk_size)[0][0] for each in pair
        )
        return own - reference
