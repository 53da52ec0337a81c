"""Exact and fuzzy speculative decoding on token trees for any transformers causal LM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsd_core.errors import FsdError
    from fsd_infer.decoder import FuzzyDecoder, Generation, generate, load_drafter
    from fsd_infer.drafters import DRAFTERS, Drafter, EagleDrafter, LMDrafter, NoDrafter, TreeShape
    from fsd_infer.engine.stats import GenerationStats, RowStats
    from fsd_infer.rules import RULES, DraftOnly, Exact, Fuzzy, FuzzyStrict, RandomGate, Rule, parse_rule
    from fsd_infer.targets.target import Target

__version__ = "0.1.0"

# The module of each public name, imported when the name is first used: importing torch and transformers takes seconds,
# which `fsd-infer --help` and a mistyped option should not.
_MODULES = {
    "fsd_infer.decoder": ("FuzzyDecoder", "Generation", "generate", "load_drafter"),
    "fsd_infer.drafters": ("DRAFTERS", "Drafter", "EagleDrafter", "LMDrafter", "NoDrafter", "TreeShape"),
    "fsd_core.errors": ("FsdError",),
    "fsd_infer.rules": ("RULES", "DraftOnly", "Exact", "Fuzzy", "FuzzyStrict", "RandomGate", "Rule", "parse_rule"),
    "fsd_infer.engine.stats": ("GenerationStats", "RowStats"),
    "fsd_infer.targets.target": ("Target",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

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
    "generate",
    "load_drafter",
    "parse_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fsd_infer' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
