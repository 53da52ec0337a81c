"""How beams are drafted."""

from __future__ import annotations

from dataclasses import dataclass

from fsd_infer.errors import FsdError


@dataclass(frozen=True)
class BeamOptions:
    """Options of speculative beams. None changes what is found, only how many forwards of the target it takes.

    Attributes:
        depth: steps of the search that are drafted per round; 0: none. None: by device.
        spread: nodes drafted per step, in multiples of the number of beams; None: by device.
        nodes: most nodes verified per round, besides the beams' own; None: no other limit.
    """

    depth: int | None = None
    spread: float | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise FsdError(f"beams are drafted depth >= 0 steps ahead, got {self.depth}.")
        if self.spread is not None and not self.spread >= 1.0:
            raise FsdError(f"spread is at least 1, a node for every beam; got {self.spread}.")
        if self.nodes is not None and self.nodes < 0:
            raise FsdError(f"nodes must be at least 0, got {self.nodes}.")
