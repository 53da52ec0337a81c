"""Losses by name. One file per loss; importing this package registers them all.

A loss is a callable ``loss(batch: DraftBatch) -> LossOutput``; its constructor takes the recipe's ``loss_args``.
"""

from __future__ import annotations

from fsd_train.losses.base import LOSSES, DraftBatch, LMHead, Loss, LossOutput, build_loss
from fsd_train.losses.divergences import DivergenceLoss
from fsd_train.losses.eagle import EagleLoss, soft_cross_entropy
from fsd_train.losses.fsd import FSDLoss
from fsd_train.losses.js import JSLoss
from fsd_train.losses.kl import KLLoss
from fsd_train.losses.lk import LKLoss
from fsd_train.losses.reverse_kl import ReverseKLLoss
from fsd_train.losses.tv import TVLoss

__all__ = [
    "LOSSES",
    "DivergenceLoss",
    "DraftBatch",
    "EagleLoss",
    "FSDLoss",
    "JSLoss",
    "KLLoss",
    "LKLoss",
    "LMHead",
    "Loss",
    "LossOutput",
    "ReverseKLLoss",
    "TVLoss",
    "build_loss",
    "soft_cross_entropy",
]
