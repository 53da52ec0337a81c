"""Losses that are a divergence of drafter and target, by the names of :mod:`fsd_infer.divergence`."""

from __future__ import annotations

from typing import ClassVar

from fsd_infer.divergence import BOTH_KL, RENAMED
from fsd_infer.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, LossOutput, weighted_mean, with_features
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
        return with_features(self.w_feature, batch, LossOutput(loss, parts, agree))


@LOSSES.register("kl_qp")
class KLQPLoss(DivergenceLoss):
    """KL(q||p) = Σ q ln(q/p), draft from target: seeks a mode, since q pays wherever it puts mass that p has not.

    The literature on distillation calls this direction the reverse KL. Arguments as in :class:`DivergenceLoss`.
    """

    divergence = "kl_qp"


@LOSSES.register("kl_pq")
class KLPQLoss(DivergenceLoss):
    """KL(p||q) = Σ p ln(p/q), target from draft: covers the mass of p. Its gradient is that of soft cross-entropy.

    The literature on distillation calls this direction the forward KL, often just "KL". Arguments as in
    :class:`DivergenceLoss`.
    """

    divergence = "kl_pq"


@LOSSES.register("js")
class JSLoss(DivergenceLoss):
    """KL(p||m)/2 + KL(q||m)/2 with m = (p+q)/2, at most ln 2, so that hopeless rows do not rule the mean.

    Arguments as in :class:`DivergenceLoss`.
    """

    divergence = "js"


@LOSSES.register("tv")
class TVLoss(DivergenceLoss):
    """Σ |p−q| / 2 = 1 − Σ min(p, q), the chance that the exact test refuses a sampled draft.

    Its gradient vanishes where p and q hardly overlap, so an untrained head learns slowly from it alone: see the lk
    loss. Arguments as in :class:`DivergenceLoss`.
    """

    divergence = "tv"


for _old in RENAMED:
    LOSSES.retire(_old, BOTH_KL)
