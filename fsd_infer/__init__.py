"""Exact and fuzzy speculative decoding on token trees for any transformers causal LM."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsd_core.errors import FsdError
    from fsd_infer.decoder import FuzzyConfig, FuzzyDecoder, GenerateOutput, RuntimeConfig, generate
    from fsd_infer.drafters import Drafter, TreeShape
    from fsd_infer.engine.callback import Callback
    from fsd_infer.engine.stats import GenerationStats
    from fsd_infer.rules import Rule
    from fsd_infer.targets.target import Target

__version__ = "0.1.0"

# The module of each public name, imported when the name is first used: importing torch and transformers takes seconds,
# which `fsd-infer --help` and a mistyped option should not.
_MODULES = {
    "fsd_infer.decoder": ("FuzzyConfig", "FuzzyDecoder", "GenerateOutput", "RuntimeConfig", "generate"),
    "fsd_infer.drafters": ("Drafter", "TreeShape"),
    "fsd_core.errors": ("FsdError",),
    "fsd_infer.engine.callback": ("Callback",),
    "fsd_infer.engine.stats": ("GenerationStats",),
    "fsd_infer.rules": ("Rule",),
    "fsd_infer.targets.target": ("Target",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
# Names that this module offered, and their homes. They work here until release 0.2, with one warning each.
_MOVED_FROM_HERE = {
    "fsd_infer.decoder": ("load_drafter",),
    "fsd_infer.drafters": ("DRAFTERS", "EagleDrafter", "LMDrafter", "NoDrafter"),
    "fsd_infer.engine.stats": ("RowStats",),
    "fsd_infer.rules": ("RULES", "DraftOnly", "Exact", "Fuzzy", "FuzzyStrict", "RandomGate", "parse_rule"),
}
_MOVED = {name: module for module, names in _MOVED_FROM_HERE.items() for name in names}

__all__ = [
    "Callback",
    "Drafter",
    "FsdError",
    "FuzzyConfig",
    "FuzzyDecoder",
    "GenerateOutput",
    "GenerationStats",
    "Rule",
    "RuntimeConfig",
    "Target",
    "TreeShape",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name == "Generation":
        warnings.warn("Generation is now GenerateOutput.", FutureWarning, stacklevel=2)
        value = __getattr__("GenerateOutput")
    elif name in _MOVED:
        warnings.warn(f"{name} is now in {_MOVED[name]}: import it from there.", FutureWarning, stacklevel=2)
        value = getattr(importlib.import_module(_MOVED[name]), name)
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'fsd_infer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
