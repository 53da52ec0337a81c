"""Drafters: what proposes tokens for the target to verify."""

from fsd_infer.drafters.base import DRAFTERS, Drafter, DraftRequest, DraftSession, NoDrafter
from fsd_infer.drafters.eagle import EagleDrafter, TreeShape
from fsd_infer.drafters.lm import LMDrafter

__all__ = [
    "DRAFTERS",
    "DraftRequest",
    "DraftSession",
    "Drafter",
    "EagleDrafter",
    "LMDrafter",
    "NoDrafter",
    "TreeShape",
]
