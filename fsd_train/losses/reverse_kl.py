"""KL of the target from the draft: covers the mass of p. Its gradient is that of soft cross-entropy.

The literature on distillation calls this direction the forward KL, often just "KL"; names here are those of
fsd_infer.divergence.
"""

from __future__ import annotations

from fsd_train.losses.base import LOSSES
from fsd_train.losses.divergences import DivergenceLoss


@LOSSES.register("reverse_kl")
class ReverseKLLoss(DivergenceLoss):
    """KL(p||q) = Σ p ln(p/q), target from draft; arguments as in :class:`DivergenceLoss`."""

    divergence = "reverse_kl"
