"""What the losses that are a divergence of the drafter's distribution from the target's have in common."""

from __future__ import annotations

from typing import ClassVar

from fsd_infer.errors import DataError
from fsd_train.losses.base import DraftBatch, LossOutput, feature_distance, weighted_mean
from fsd_train.losses.rows import check_chunk_size, chunked_rows, divergence_rows


class DivergenceLoss:
    """w_divergence·D(p, q) + w_feature·SmoothL1(estimate, feature), each a weighted mean over supervised rows.

    D is the divergence of :mod:`fsd_infer.divergence` with the same name, on raw distributions over the draft
    vocabulary: p, the target's, is renormalised within it. The feature term is that of the ``eagle`` loss.

    Args:
        w_divergence: weight of the divergence.
        w_feature: weight of the feature term; 0 leaves it out.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    divergence: ClassVar[str]

    def __init__(self, w_divergence: float = 1.0, w_feature: float = 0.0, chunk_size: int | None = None) -> None:
        if w_divergence <= 0 or w_feature < 0:
            raise DataError(
                f"w_divergence must be positive and w_feature must not be negative, got {w_divergence} and {w_feature}."
            )
        check_chunk_size(chunk_size)
        self.w_divergence = w_divergence
        self.w_feature = w_feature
        self.chunk_size = chunk_size
        self._rows = divergence_rows(self.divergence)

    def __call__(self, batch: DraftBatch) -> LossOutput:
        values, agree = chunked_rows(lambda p, q: self._rows(p, q)[None], batch, self.chunk_size)
        mean = weighted_mean(values[0], batch.weights)
        loss, parts = self.w_divergence * mean, {f"{self.divergence}_loss": mean.detach()}
        if self.w_feature:
            feature = weighted_mean(feature_distance(batch), batch.weights)
            loss = loss + self.w_feature * feature
            parts["feature_loss"] = feature.detach()
        return LossOutput(loss, parts, agree)
