"""Losses by name. One file per loss; importing this package registers them all.

A loss is a callable ``loss(batch: DraftBatch) -> LossOutput``; its constructor takes the recipe's ``loss_args``.
"""

from __future__ import annotations

from fsd_train.losses.base import LOSSES, DraftBatch, LMHead, Loss, LossOutput, build_loss
from fsd_train.losses.eagle import EagleLoss, soft_cross_entropy

__all__ = [
    "LOSSES",
    "DraftBatch",
    "EagleLoss",
    "LMHead",
    "Loss",
    "LossOutput",
    "build_loss",
    "soft_cross_entropy",
]
