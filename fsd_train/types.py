"""Types of numbers with a range, which jsonargparse checks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jsonargparse import typing as numbers

if TYPE_CHECKING:
    from typing import TypeAlias

    PositiveInt: TypeAlias = int
    NonNegativeInt: TypeAlias = int
    ChainSteps: TypeAlias = int
    EvalSteps: TypeAlias = int
    Seed: TypeAlias = int
    Length: TypeAlias = int
    PositiveFloat: TypeAlias = float
    NonNegativeFloat: TypeAlias = float
    Share: TypeAlias = float
    ShareOrNone: TypeAlias = float
    HeldOut: TypeAlias = float
else:
    PositiveInt, NonNegativeInt = numbers.PositiveInt, numbers.NonNegativeInt
    PositiveFloat = numbers.restricted_number_type("PositiveFiniteFloat", float, [(">", 0), ("<", float("inf"))])
    NonNegativeFloat = numbers.restricted_number_type("FiniteFloatFrom0", float, [(">=", 0), ("<", float("inf"))])
    ChainSteps = numbers.restricted_number_type("From1To7", int, [(">=", 1), ("<=", 7)])
    EvalSteps = numbers.restricted_number_type("From1To64", int, [(">=", 1), ("<=", 64)])
    Seed = numbers.restricted_number_type("Seed", int, [(">=", 0), ("<", 2**31)])
    Length = numbers.restricted_number_type("From2", int, (">=", 2))
    Share = numbers.restricted_number_type("ShareAbove0", float, [(">", 0), ("<=", 1)])
    ShareOrNone = numbers.ClosedUnitInterval
    HeldOut = numbers.restricted_number_type("ShareBelow1", float, [(">=", 0), ("<", 1)])

_RANGES = {kind.__name__: kind for kind in list(globals().values()) if hasattr(kind, "_expression")}
_SAYS = re.compile(
    r"""Parser key "([\w.]+)": (?:Not of type (\w+): |Expected a <class '(\w+)'>\. Got value: )(.*)""", re.S
)
_GOT = re.compile(
    r"(.*) does not conform .*|(.*) not an? (?:integer|number)|.*(?:, not |literal.*: |float: )(.*)", re.S
)
_NAMES = {"None": "null", "'NoneType'": "null", "'list'": "a list", "'dict'": "options"}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list", "str": "text"}


def in_words(message: str) -> str:
    """Return what jsonargparse says of a value that its parameter cannot have, in words; any other text as it is."""
    found = _SAYS.fullmatch(message.strip())
    if found is None:
        return message
    key, ranged, kind, got = found.groups()
    if ranged:
        limits = getattr(_RANGES.get(ranged), "_expression", "")
        kind = getattr(getattr(_RANGES.get(ranged), "_type", None), "__name__", ranged)
        parts = _GOT.fullmatch(got)
        got = next(filter(None, parts.groups()), got) if parts else got
    wanted = _KINDS.get(kind, kind) + (re.sub(r"v([<>]=?)", r" \1 ", limits) if ranged else "")
    return f"{key}: expected {wanted}, got {_NAMES.get(got, got)}."
