"""How beams are drafted, and how many a sampled step keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from fsd_infer.errors import FsdError
from fsd_infer.numerals import read_float, read_int


@dataclass(frozen=True)
class BeamOptions:
    """Options of speculative beams.

    The first three never change what is found, only how many forwards of the target it takes. The others belong to beam
    sampling and change its law, see docs/beams.md.

    Attributes:
        depth: steps of the search that are drafted per round; 0: none. None: by device.
        spread: nodes drafted per step, in multiples of the number of beams; None: by device.
        nodes: most nodes verified per round, besides the beams' own; None: no other limit, and by device where depth
            and spread are None too.
        confidence: dynamic width: a step keeps the most beams that are all drafted with at least this chance, above 0
            and at most 1; None: always ``num_beams``.
        min_width: the fewest that it keeps then; None: 1.
        join_every: every so many steps, at least 2, one beam alone goes on, so the cache holds one sequence besides the
            beams of these steps; None: never.
    """

    depth: int | None = None
    spread: float | None = None
    nodes: int | None = None
    confidence: float | None = None
    min_width: int | None = None
    join_every: int | None = None

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise FsdError(f"beams are drafted depth >= 0 steps ahead, got {self.depth}.")
        if self.spread is not None and not self.spread >= 1.0:
            raise FsdError(f"spread is at least 1, a node for every beam; got {self.spread}.")
        if self.nodes is not None and self.nodes < 0:
            raise FsdError(f"nodes must be at least 0, got {self.nodes}.")
        if self.confidence is not None and not 0.0 < self.confidence <= 1.0:
            raise FsdError(f"confidence is a chance above 0 and at most 1, got {self.confidence}.")
        if self.min_width is not None and self.confidence is None:
            raise FsdError("min_width bounds a dynamic width: set confidence as well, or leave it out.")
        if self.min_width is not None and self.min_width < 1:
            raise FsdError(f"min_width is at least 1 beam, got {self.min_width}.")
        if self.join_every is not None and self.join_every < 2:
            raise FsdError(f"join_every is at least 2 steps, got {self.join_every}. A single beam is num_beams=1.")

    @classmethod
    def parse(cls, text: str) -> BeamOptions:
        """Options written "depth=4,spread=2", or "depth=4:spread=2" within a list. Raises FsdError for others."""
        known = {field.name: read_float if "float" in str(field.type) else read_int for field in fields(cls)}
        found: dict[str, Any] = {}
        for part in re.split("[:,]", text):
            name, _, written = part.partition("=")
            if name not in known or name in found:
                raise FsdError(f"beam option {part!r}: write NAME=NUMBER, each name once, of {', '.join(known)}.")
            found[name] = known[name](written)
            if found[name] is None:
                raise FsdError(f"beam option {part!r}: {written!r} is not a number that {name} can be.")
        return cls(**found)

    def given(self) -> dict[str, Any]:
        """What differs from the defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
