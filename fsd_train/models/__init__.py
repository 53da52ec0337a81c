"""What is trained: heads and small LMs, as LightningModules."""

from __future__ import annotations

from fsd_train.models.distillation import DistillationModule
from fsd_train.models.eagle import EagleModule
from fsd_train.models.lm import LMModule

__all__ = [
    "DistillationModule",
    "EagleModule",
    "LMModule",
]
