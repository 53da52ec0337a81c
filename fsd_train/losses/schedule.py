"""Numbers that change during a run, such as weights of a mix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fsd_train.types import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class Schedule:
    """A number that moves from ``start`` to ``end`` in the first part of a run and then stays.

    Attributes:
        start, end: the values.
        over: length of the first part: a share of the run if at most 1, else a number of optimizer steps.
        kind: "linear", "cosine" (half a period), or "constant" (``start`` during the first part, then ``end``).
    """

    start: NonNegativeFloat
    end: NonNegativeFloat
    over: PositiveFloat = 1.0
    kind: Literal["linear", "cosine", "constant"] = "linear"

    @classmethod
    def of(cls, value: float | Schedule) -> Schedule:
        """Wrap a number in a constant schedule."""
        return value if isinstance(value, Schedule) else cls(value, value)

    @property
    def moves(self) -> bool:
        """Whether the value ever changes."""
        return self.start != self.end

    def at(self, progress: float, step: float) -> float:
        """Return the value after the share ``progress`` (0 to 1) of the run and ``step`` optimizer steps."""
        passed = progress / self.over if self.over <= 1 else step / self.over
        passed = min(max(passed, 0.0), 1.0)
        shapes = {"linear": passed, "cosine": 0.5 * (1 - math.cos(math.pi * passed)), "constant": float(passed >= 1)}
        done = shapes[self.kind]
        return self.end if done == 1 else self.start + (self.end - self.start) * done
