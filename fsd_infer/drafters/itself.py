"""Small models made from the target's own weights, without training, as in SWIFT (arXiv 2410.06916) and QuantSpec
(2502.10424).

"self:layers=0-9,20-29" is the target with these decoder layers only. "self:bits=3" is the target with linear weights
rounded to three bits. "self:layers=0-9,20-29:bits=3" is both.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsd_core.errors import FsdError
from fsd_core.registry import read_int
from fsd_infer.targets.sharing import with_layers, with_rounded_weights
from fsd_infer.targets.target import Target

PREFIX = "self:"
MAX_LAYERS = 4096
_FORM = "write self:layers=0-9,20-29, self:bits=3 or self:layers=0-9,20-29:bits=3"


@dataclass(frozen=True)
class Itself:
    """How a small model is made from the target.

    Attributes:
        layers: indices of the decoder layers to keep; None: all.
        bits: to which linear weights in these layers are rounded; None: not rounded.
    """

    layers: tuple[int, ...] | None = None
    bits: int | None = None

    @classmethod
    def parse(cls, name: str) -> Itself:
        """Parse a name that begins with "self:". Raises FsdError for a malformed one."""
        options: dict[str, str] = {}
        for part in name.removeprefix(PREFIX).split(":"):
            key, _, value = part.partition("=")
            if key not in ("layers", "bits") or not value or key in options:
                raise FsdError(f"{name}: cannot use {part!r}; {_FORM}.")
            options[key] = value
        bits = None if "bits" not in options else read_int(options["bits"])
        if "bits" in options and (bits is None or not 2 <= bits <= 8):
            raise FsdError(f"{name}: bits must be a whole number from 2 to 8.")
        return cls(_numbers(name, options["layers"]) if "layers" in options else None, bits)

    def of(self, target: Target, name: str) -> Target:
        """Return the small model under the name ``name``.

        Raises:
            FsdError: a layer that the target lacks.
            ModelLoadError: a target whose layers cannot be left out or whose weights cannot be rounded.
        """
        made = target if self.layers is None else with_layers(target, self.layers, name)
        return made if self.bits is None else with_rounded_weights(made, self.bits, name)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse "0-9,20-29" to layers 0 to 9 and 20 to 29."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = [read_int(end) for end in part.split("-")]
        if None in ends or not 1 <= len(ends) <= 2 or not 0 <= ends[0] <= ends[-1] < MAX_LAYERS:  # type: ignore[operator]
            raise FsdError(f"{name}: {part!r} is neither a layer nor a range of layers; {_FORM}.")
        numbers += range(ends[0], ends[-1] + 1)  # type: ignore[operator, arg-type]
    if numbers != sorted(set(numbers)):
        raise FsdError(f"{name}: give each layer once and in ascending order.")
    return tuple(numbers)


def spelled(layers: tuple[int, ...]) -> str:
    """Return the name for these layers, such as "self:layers=0-2,5" for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f"{PREFIX}layers=" + ",".join(f"{low}-{high}" if low < high else str(low) for low, high in runs)
