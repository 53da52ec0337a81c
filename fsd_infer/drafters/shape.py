"""Shapes of draft trees: their sizes, where drafting stops, and which is drafted unless another is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from fsd_infer.errors import FsdError
from fsd_infer.registry import read_float, read_int

T = TypeVar("T")

AUTO = "auto"  # the name of trees that are chosen round by round

MOST_DEPTH, MOST_NODES = 256, 1024  # of a tree: no text is guessed so far ahead, and no forward is worth more drafts
MOST_CANDIDATES = 2**16  # of a round


def check_tree(name: str, depth: int, nodes: int, width: int = 1) -> None:
    """Raises FsdError unless these are sizes of a draft tree, the root counted among its nodes."""
    for option, value, least, most in (
        ("depth", depth, 1, MOST_DEPTH), ("nodes", nodes, 2, MOST_NODES), ("width", width, 1, MOST_DEPTH)
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise FsdError(f"{name} needs {option} from {least} to {most}, got {value!r}.")


def check_stop_below(chance: float) -> None:
    """Raises FsdError if it is no chance below which drafting may stop."""
    if not 0 <= chance < 1:
        raise FsdError(f"stop_below is a probability, at least 0 and below 1; got {chance}.")


@dataclass(frozen=True)
class TreeShape:
    """Options of the dynamic tree.

    Attributes:
        depth: deepest draft (number of tokens ahead of the root).
        width: nodes expanded per depth and children per expanded node.
        nodes: nodes verified per round, the root included.
        stop_below: draft no deeper where the drafter gives less than this chance that the answer runs through any of
            the nodes to be expanded next (their cumulative q, added up, each step tilted as the law will be); 0: always
            draft ``depth`` deep. The check waits for the device once per depth.
    """

    depth: int
    width: int
    nodes: int
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        check_tree("a draft tree", self.depth, self.nodes, self.width)
        if self.candidates > MOST_CANDIDATES:
            raise FsdError(
                f"a draft tree of depth {self.depth} and width {self.width} has {self.candidates} candidates, over "
                f"{MOST_CANDIDATES}: give a smaller width."
            )
        check_stop_below(self.stop_below)

    @classmethod
    def chain(cls, depth: int, stop_below: float = 0.0) -> TreeShape:
        """One child per node."""
        return cls(depth, 1, depth + 1, stop_below)

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """ "5,6,16", or "5x6x16" within a list, and "5,6,16,0.3" with ``stop_below``. Raises FsdError."""
        parts = text.split("x" if "x" in text else ",")
        sizes = [size for part in parts[:3] if (size := read_int(part)) is not None]
        stop_below = read_float(parts[3]) if len(parts) > 3 else 0.0
        if len(sizes) != 3 or len(parts) > 4 or stop_below is None:
            raise FsdError(
                "a tree is written depth,width,nodes and perhaps stop_below, e.g. 5,6,16 or 5,6,16,0.3 "
                f"(or auto, for --tree); got {text!r}."
            )
        depth, width, nodes = sizes
        return cls(depth, width, nodes, stop_below)

    @property
    def text(self) -> str:
        """As :meth:`parse` reads it within a list."""
        stop = [f"{self.stop_below:g}"] if self.stop_below else []
        return "x".join([str(self.depth), str(self.width), str(self.nodes), *stop])

    @property
    def candidates(self) -> int:
        return self.width + (self.depth - 1) * self.width**2

    @property
    def max_nodes(self) -> int:
        """Nodes of a tree at most, the root included."""
        return min(self.nodes, 1 + self.candidates)


# A CPU pays for every verified node, a GPU hardly.
DEFAULT_SHAPES = {"cpu": TreeShape(depth=5, width=6, nodes=16), "cuda": TreeShape(depth=6, width=10, nodes=60)}
# Under a law that favours drafts depth pays, and width does not ...
TILTED_SHAPES = {
    "cpu": TreeShape(depth=10, width=2, nodes=11, stop_below=0.2),
    "cuda": TreeShape(depth=8, width=8, nodes=60),
}
# ... unless it favours them little, as tilted:2 does at temperature 1.
LITTLE_TILT = 0.75
LITTLE_TILT_SHAPES = {**TILTED_SHAPES, "cpu": TreeShape(depth=6, width=4, nodes=9, stop_below=0.5)}


# What trees are chosen within. A small LM is right further down than a head, and each of its depths costs more.
LARGEST = {"cpu": TreeShape(depth=12, width=6, nodes=48), "cuda": TreeShape(depth=6, width=8, nodes=64)}
LARGEST_OF_LM = {**LARGEST, "cpu": TreeShape(depth=16, width=4, nodes=24)}


def parse_tree(text: str | None) -> TreeShape | str | None:
    """A shape as :meth:`TreeShape.parse` reads it; "auto" and None stay."""
    return text if text in (None, AUTO) else TreeShape.parse(text)


def of_device(defaults: Mapping[str, T], device: torch.device) -> T:
    """What ``defaults`` has for this kind of device; accelerators that it does not name are as "cuda"."""
    return defaults.get(device.type, defaults["cuda"])
