"""KL of the draft from the target: seeks a mode, since q pays wherever it puts mass that p has not.

The literature on distillation calls this direction the reverse KL; names here are those of fsd_infer.divergence.
"""

from __future__ import annotations

from fsd_train.losses.base import LOSSES
from fsd_train.losses.divergences import DivergenceLoss


@LOSSES.register("kl")
class KLLoss(DivergenceLoss):
    """KL(q||p) = Σ q ln(q/p), draft from target; arguments as in :class:`DivergenceLoss`."""

    divergence = "kl"
