"""Drafters made of the target itself, without training (as SWIFT, arXiv 2410.06916, and QuantSpec, 2502.10424, do).

"self:layers=0-9,20-29" is the target with these decoder layers alone, "self:bits=3" the target with linear weights
rounded to three bits, "self:layers=0-9,20-29:bits=3" both.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsd_infer.errors import FsdError
from fsd_infer.registry import read_int
from fsd_infer.targets.sharing import with_layers, with_rounded_weights
from fsd_infer.targets.target import Target

PREFIX = "self:"
MOST_LAYERS = 4096
_FORM = "write self:layers=0-9,20-29, self:bits=3 or self:layers=0-9,20-29:bits=3"


@dataclass(frozen=True)
class Itself:
    """What of the target is left.

    Attributes:
        layers: numbers of its decoder layers, None: all.
        bits: of the linear weights in them, None: as they are.
    """

    layers: tuple[int, ...] | None = None
    bits: int | None = None

    @classmethod
    def parse(cls, name: str) -> Itself:
        """ "self:..." as a value. Raises FsdError."""
        options: dict[str, str] = {}
        for part in name.removeprefix(PREFIX).split(":"):
            key, _, value = part.partition("=")
            if key not in ("layers", "bits") or not value or key in options:
                raise FsdError(f"{name}: {part!r} says nothing about the target: {_FORM}.")
            options[key] = value
        bits = None if "bits" not in options else read_int(options["bits"])
        if "bits" in options and (bits is None or not 2 <= bits <= 8):
            raise FsdError(f"{name}: bits is a whole number from 2 to 8.")
        return cls(_numbers(name, options["layers"]) if "layers" in options else None, bits)

    def of(self, target: Target, name: str) -> Target:
        """The small model, called ``name``. Raises FsdError, ModelLoadError."""
        made = target if self.layers is None else with_layers(target, self.layers, name)
        return made if self.bits is None else with_rounded_weights(made, self.bits, name)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """ "0-9,20-29" -> 0, ..., 9, 20, ..., 29."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = [read_int(end) for end in part.split("-")]
        if None in ends or not 1 <= len(ends) <= 2 or not 0 <= ends[0] <= ends[-1] < MOST_LAYERS:  # type: ignore[operator]
            raise FsdError(f"{name}: {part!r} is no layer and no range of layers: {_FORM}.")
        numbers += range(ends[0], ends[-1] + 1)  # type: ignore[operator, arg-type]
    if numbers != sorted(set(numbers)):
        raise FsdError(f"{name}: give each layer once and in ascending order.")
    return tuple(numbers)


def spelled(layers: tuple[int, ...]) -> str:
    """0, 1, 2, 5 -> "self:layers=0-2,5"."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"{PREFIX}layers=" + ",".join(f"{low}-{high}" if low < high else str(low) for low, high in runs)
