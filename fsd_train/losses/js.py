"""Jensen-Shannon divergence: symmetric, at most ln 2, so that hopeless rows do not rule the mean."""

from __future__ import annotations

from fsd_train.losses.base import LOSSES
from fsd_train.losses.divergences import DivergenceLoss


@LOSSES.register("js")
class JSLoss(DivergenceLoss):
    """KL(p||m)/2 + KL(q||m)/2 with m = (p+q)/2; arguments as in :class:`DivergenceLoss`."""

    divergence = "js"
