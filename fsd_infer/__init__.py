"""Exact and fuzzy speculative decoding on token trees for any transformers causal LM."""

from fsd_infer.decoder import FuzzyDecoder, Generation, generate, load_drafter
from fsd_infer.divergence import divergence
from fsd_infer.drafters import DRAFTERS, Drafter, EagleDrafter, LMDrafter, NoDrafter, TreeShape
from fsd_infer.errors import FsdError
from fsd_infer.rules import RULES, DraftOnly, Exact, Fuzzy, FuzzyStrict, RandomGate, Rule, parse_rule
from fsd_infer.stats import GenerationStats, RowStats
from fsd_infer.target import Target

__version__ = "0.1.0"

__all__ = [
    "DRAFTERS",
    "RULES",
    "DraftOnly",
    "Drafter",
    "EagleDrafter",
    "Exact",
    "FsdError",
    "Fuzzy",
    "FuzzyDecoder",
    "FuzzyStrict",
    "Generation",
    "GenerationStats",
    "LMDrafter",
    "NoDrafter",
    "RandomGate",
    "RowStats",
    "Rule",
    "Target",
    "TreeShape",
    "divergence",
    "generate",
    "load_drafter",
    "parse_rule",
]
