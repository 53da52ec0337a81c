"""Losses by name. One file per kind of loss; importing this package registers them all.

A loss is a callable ``loss(batch: DraftBatch) -> LossOutput``; its constructor takes the recipe's ``loss_args``. A list
in the recipe mixes several: :class:`fsd_train.losses.mix.MixLoss`.
"""

from __future__ import annotations

from fsd_train.losses.adaspec import AdaSpecLoss
from fsd_train.losses.base import LOSSES, DraftBatch, LMHead, Loss, LossOutput, has_feature_term, reference_of
from fsd_train.losses.divergences import DivergenceLoss, JSLoss, KLPQLoss, KLQPLoss, TVLoss
from fsd_train.losses.eagle import EagleLoss, soft_cross_entropy
from fsd_train.losses.fsd import FSDLoss
from fsd_train.losses.lk import LKLoss
from fsd_train.losses.mix import MixLoss, build_loss
from fsd_train.losses.schedule import Schedule

__all__ = [
    "LOSSES",
    "AdaSpecLoss",
    "DivergenceLoss",
    "DraftBatch",
    "EagleLoss",
    "FSDLoss",
    "JSLoss",
    "KLQPLoss",
    "LKLoss",
    "LMHead",
    "Loss",
    "LossOutput",
    "MixLoss",
    "KLPQLoss",
    "Schedule",
    "TVLoss",
    "build_loss",
    "has_feature_term",
    "reference_of",
    "soft_cross_entropy",
]
