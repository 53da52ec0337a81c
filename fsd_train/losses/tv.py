"""Total variation: the chance that the exact test refuses a sampled draft.

Its gradient vanishes where p and q hardly overlap, so an untrained head learns slowly from it alone: see the lk loss.
"""

from __future__ import annotations

from fsd_train.losses.base import LOSSES
from fsd_train.losses.divergences import DivergenceLoss


@LOSSES.register("tv")
class TVLoss(DivergenceLoss):
    """Σ |p−q| / 2 = 1 − Σ min(p, q); arguments as in :class:`DivergenceLoss`."""

    divergence = "tv"
