"""What is trained: heads and small LMs, as LightningModules, and optimisers that torch lacks."""

from __future__ import annotations

from fsd_train.models.block import BlockModule, BlockOptions
from fsd_train.models.distillation import DistillationModule
from fsd_train.models.eagle import EagleModule
from fsd_train.models.head_options import HeadOptions
from fsd_train.models.lm import LMModule
from fsd_train.models.mtp import MtpModule
from fsd_train.models.optim import MuonAdamW, WarmupCosine

__all__ = [
    "BlockModule",
    "BlockOptions",
    "DistillationModule",
    "EagleModule",
    "HeadOptions",
    "LMModule",
    "MtpModule",
    "MuonAdamW",
    "WarmupCosine",
]
