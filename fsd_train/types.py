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
_KEYED = re.compile(r"""Parser key "([\w.]+)": (.*)""", re.S)
_RANGED = re.compile(r"Not of type (\w+): (.*)", re.S)
_OF_KIND = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*)\])\. Got value: (.*)", re.S)
_GOT = re.compile(
    r"(.*) does not conform .*|(.*) not an? (?:integer|number)|.*(?:, not |literal.*: |float: )(.*)", re.S
)
_ONE_OF = re.compile(
    r"Does not validate .*Subtypes: \[(.*?)\] Errors: .* Given value type: <class '([\w.]+)'> Given value: (.*)", re.S
)
_SUBTYPE = re.compile(r"<class '(?:\w+\.)*(\w+)'>|(list)\[")
_OPTION = re.compile(r"Option '(\w+)' is not accepted")
_CLASS = re.compile(r"Problem with given class_path .*?(?= - |$)|module '[\w.]+' has no attribute '\w+'", re.S)
_SAID_BEFORE = re.compile(r" - ([\w.]+: (?:expected|this class) .*?\.)(?= - | Given value type: )", re.S)
_NAMES = {"None": "null", "'NoneType'": "null", "'list'": "a list", "'dict'": "options"}
_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list", "str": "text",
    "dict": "options", "NoneType": "null",
}  # fmt: skip


def in_words(message: str) -> str:
    """Return what jsonargparse says of a value that its parameter cannot have, in words; any other text as it is."""
    keyed = _KEYED.fullmatch(message.strip())
    if keyed is None:
        problem = _CLASS.search(message) if message.startswith("Does not validate") else None
        return f"{problem[0]}." if problem else message
    key, said = keyed.groups()
    if option := _OPTION.search(said):
        return f"{key}: this class has no option {option[1]!r}. Leave it out, or correct its name."
    if problem := _CLASS.search(said):
        return f"{key}: {problem[0]}."
    if within := _SAID_BEFORE.search(said):
        return f"{key}.{within[1]}"
    if ranged := _RANGED.fullmatch(said):
        parts = _GOT.fullmatch(ranged[2])
        return _expected(key, _wanted(ranged[1]), next(filter(None, parts.groups()), "") if parts else ranged[2])
    if of_kind := _OF_KIND.fullmatch(said):
        return _expected(key, _wanted(of_kind[1]) if of_kind[1] else f"one of {of_kind[2]}", of_kind[3])
    if one_of := _ONE_OF.fullmatch(said):
        kinds = dict.fromkeys(_wanted(name or listed) for name, listed in _SUBTYPE.findall(one_of[1]))
        return _expected(key, " or ".join(kinds), one_of[3])
    return message


def _expected(key: str, wanted: str, got: str) -> str:
    return f"{key}: expected {wanted}, got {_NAMES.get(got, got)}."


def _wanted(kind: str) -> str:
    """Return the name of a type in words."""
    if ranged := _RANGES.get(kind):
        return _KINDS[ranged._type.__name__] + re.sub(r"v([<>]=?)", r" \1 ", ranged._expression)
    return _KINDS.get(kind, "a class_path with init_args")
