"""Losses by name, one file per kind; importing this package registers them all.

A recipe names a :class:`fsd_train.losses.base.Loss` (``loss: eagle``) or gives its ``class_path`` and ``init_args``.
"""

from __future__ import annotations

from fsd_train.losses.adaspec import AdaSpecLoss
from fsd_train.losses.base import (
    LOSSES,
    DraftBatch,
    LMHead,
    Loss,
    LossOutput,
    Schedule,
    as_loss,
    has_feature_term,
    reference_of,
)
from fsd_train.losses.divergences import DivergenceLoss
from fsd_train.losses.eagle import EagleLoss
from fsd_train.losses.fsd import FsdLoss
from fsd_train.losses.lk import LKLoss
from fsd_train.losses.mix import MixLoss, Part
from fsd_train.losses.one_row import OneRowLoss, row_loss

__all__ = [
    "LOSSES", "AdaSpecLoss", "DivergenceLoss", "DraftBatch", "EagleLoss", "FsdLoss", "LKLoss", "LMHead", "Loss",
    "LossOutput", "MixLoss", "OneRowLoss", "Part", "Schedule", "as_loss", "has_feature_term", "reference_of",
    "row_loss",
]  # fmt: skip
