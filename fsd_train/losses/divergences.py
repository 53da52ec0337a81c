"""Divergences of drafter and target as losses, with the names of :mod:`fsd_core.divergence`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fsd_core.divergence import BOTH_KL, RENAMED
from fsd_train.losses.base import LOSSES, DraftBatch, Loss, LossOutput, with_features
from fsd_train.losses.rows import RowFunction, divergence_rows, mean_of_rows
from fsd_train.types import NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(eq=False)
class DivergenceLoss(Loss):
    """w_divergence·D(p, q) + w_feature·SmoothL1(estimate, feature), each a weighted mean over supervised rows.

    D compares raw distributions over the draft vocabulary, within which p is renormalised. The feature term is that of
    the ``eagle`` loss. docs/losses.md compares the divergences.

    Args:
        divergence: D, a name of :mod:`fsd_core.divergence`: ``kl_pq``, ``kl_qp``, ``js``, ``tv`` or a top-k form.
        w_divergence: weight of the divergence.
        w_feature: weight of the feature term; 0 omits it.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    divergence: str = "kl_pq"
    w_divergence: PositiveFloat = 1.0
    w_feature: NonNegativeFloat = 0.0
    chunk_size: PositiveInt | None = None

    def __post_init__(self) -> None:
        self._rows = RowFunction.of_one(divergence_rows(self.divergence))

    @property
    def name(self) -> str:
        return self.divergence

    def __call__(self, batch: DraftBatch) -> LossOutput:
        mean, agree = mean_of_rows(self._rows, batch, self.chunk_size)
        loss, parts = self.w_divergence * mean, {f"{self.divergence}_loss": mean.detach()}
        return with_features(self.w_feature, batch, LossOutput(loss, parts, agree))


for _name in ("kl_qp", "kl_pq", "js", "tv"):
    LOSSES.register(_name)(partial(DivergenceLoss, _name))
for _old in RENAMED:
    LOSSES.retire(_old, BOTH_KL)
