"""Types of numbers with a range, which jsonargparse checks."""

from __future__ import annotations

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
