"""Numbers that change in the course of a run: weights of a mix, the share of tokens that a selection keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsd_infer.errors import DataError
from fsd_infer.registry import Registry

# A shape maps how much of the change has passed, 0 to 1, to how much of it is done, 0 to 1.
SHAPES: Registry[Callable[[float], float]] = Registry("schedule kind")


@SHAPES.register("linear")
def _linear(share: float) -> float:
    return share


@SHAPES.register("cosine")
def _cosine(share: float) -> float:
    return 0.5 * (1 - math.cos(math.pi * share))


@SHAPES.register("constant")
def _constant(share: float) -> float:
    return float(share >= 1)


@dataclass(frozen=True)
class Schedule:
    """A number that goes from ``start`` to ``end`` in the first part of a run and then stays.

    Attributes:
        start, end: the values.
        over: length of that part: up to 1 a share of the run, above 1 optimiser steps.
        kind: "linear", "cosine" (half a period), or "constant" (``start`` until the part is over, then ``end``).
    """

    start: float
    end: float
    over: float = 1.0
    kind: str = "linear"

    @classmethod
    def read(cls, value: Any, name: str) -> Schedule:
        """A number, or a mapping with ``from``, ``to`` and optionally ``over`` and ``kind``, as a recipe writes it.

        Args:
            value: what the recipe says.
            name: how errors call it.

        Raises:
            DataError: neither of the two, an unknown key, a value that is no finite number, or ``over`` not positive.
            UnknownNameError: an unknown kind.
        """
        if not isinstance(value, Mapping):
            number = _number(value, name)
            return cls(number, number)
        known = {"from", "to", "over", "kind"}
        if not {"from", "to"} <= set(value) <= known:
            raise DataError(
                f"{name}: a schedule has the keys from and to, and optionally over and kind; "
                f"found {', '.join(map(str, value)) or 'none'}."
            )
        over = _number(value.get("over", 1.0), f"{name}: over")
        if over <= 0:
            raise DataError(f"{name}: over must be positive (a share of the run up to 1, or steps), got {over:g}.")
        kind = str(value.get("kind", "linear"))
        SHAPES.get(kind)
        return cls(_number(value["from"], f"{name}: from"), _number(value["to"], f"{name}: to"), over, kind)

    @property
    def moves(self) -> bool:
        """Whether it ever changes."""
        return self.start != self.end

    def at(self, progress: float, step: float) -> float:
        """The value when the share ``progress`` (0 to 1) of the run and ``step`` optimiser steps have passed."""
        passed = progress / self.over if self.over <= 1 else step / self.over
        done = SHAPES.get(self.kind)(min(max(passed, 0.0), 1.0))
        return self.end if done == 1 else self.start + (self.end - self.start) * done


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{name} must be a finite number, got {value!r}.")
    return float(value)
