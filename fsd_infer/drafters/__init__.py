"""Drafters, which propose tokens for the target to verify."""

from fsd_infer.drafters.assistant import AssistantDrafter
from fsd_infer.drafters.base import DRAFTERS, Drafter, NoDrafter
from fsd_infer.drafters.block import BlockDrafter
from fsd_infer.drafters.eagle import EagleDrafter
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.lm import LMDrafter
from fsd_infer.drafters.medusa import HydraDrafter, MedusaDrafter
from fsd_infer.drafters.memory import LookupDrafter, MemoryDrafter
from fsd_infer.drafters.mlp_speculator import MLPSpeculatorDrafter
from fsd_infer.drafters.mtp import MtpDrafter
from fsd_infer.drafters.p_eagle import ParallelEagleDrafter
from fsd_infer.drafters.recycle import RecycleDrafter
from fsd_infer.drafters.session import DraftRequest, DraftSession
from fsd_infer.drafters.text import TextDrafter
from fsd_infer.drafters.translated import TranslatedDrafter
from fsd_infer.trees.shape import TreeShape

__all__ = [
    "DRAFTERS",
    "AssistantDrafter",
    "BlockDrafter",
    "DraftRequest",
    "DraftSession",
    "Drafter",
    "EagleDrafter",
    "GraftedDrafter",
    "HydraDrafter",
    "LMDrafter",
    "LookupDrafter",
    "MLPSpeculatorDrafter",
    "MedusaDrafter",
    "MemoryDrafter",
    "MtpDrafter",
    "NoDrafter",
    "ParallelEagleDrafter",
    "RecycleDrafter",
    "TextDrafter",
    "TranslatedDrafter",
    "TreeShape",
]
