"""What drafters have in common whose model grows trees: their shapes, and memory of the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from typing_extensions import Self

from fsd_infer.device.cuda_graphs import CachedModel, GraphRecorder
from fsd_infer.drafters.base import Drafter
from fsd_infer.drafters.drawing import AcceptanceRatios
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import LARGEST, MAX_DEPTH, MENU, NO_TREE, TreeShape, default_shape


class TreeDrafter(Drafter):
    """A drafter whose model grows trees, of a fixed shape or chosen round by round.

    Args:
        target: the model to draft for.
        model: the model that grows the trees.
        vocabulary: number of entries of the drafter's distributions.
        shape: tree options (default: :func:`default_shape` of the device and the distribution).

    Attributes:
        has_default_shape: whether the shape is the default.
        largest: the largest shape, by device, within which trees are chosen round by round.
        grows: whether shapes can be chosen round by round.
        depth: most tokens that the model drafts below a text. Deeper trees are cut.
        all_shapes: the shapes to choose among where rounds are recorded.
    """

    target: Target
    samples = grows = True
    depth: int = MAX_DEPTH
    largest: Mapping[str, TreeShape] = LARGEST
    all_shapes: Sequence[TreeShape] = MENU

    def __init__(self, target: Target, model: CachedModel, vocabulary: int, shape: TreeShape | None) -> None:
        self.target, self.model, self.vocabulary = target, model, vocabulary
        self.has_default_shape = shape is None
        self.ratios: dict[Hashable, AcceptanceRatios] = {}  # by distribution and temperature
        self.shape = self._within(shape or default_shape(target.device))

    def _within(self, shape: TreeShape) -> TreeShape:
        """Return the shape no deeper than the model drafts, and no wider than its vocabulary."""
        return replace(shape, depth=min(shape.depth, self.depth), width=min(shape.width, self.vocabulary))

    def with_shape(self, shape: TreeShape) -> Self:
        """Return this drafter with another fixed shape. Both share their weights."""
        result = copy(self)
        result.has_default_shape, result.bounds, result.menu = False, None, ()
        result.shape = result._within(shape)
        return result

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """The distinct shapes of :attr:`all_shapes`, within what the model can draft."""
        return tuple(dict.fromkeys(one if one == NO_TREE else self._within(one) for one in self.all_shapes))

    def for_bonus(self, draft_bonus: float) -> Drafter:
        if not (self.has_default_shape and draft_bonus):
            return self
        return self.with_shape(self._within(default_shape(self.target.device, draft_bonus)))

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def max_depth(self) -> int:
        return min(self.shape.depth, self.max_nodes - 1)

    @property
    def recording_key(self) -> Hashable:
        return type(self), self.model, self.shape, self.menu

    def slots(self, max_length: int) -> int:
        """Return the cache slots per row for texts of up to ``max_length`` tokens and the nodes expanded after them."""
        return max_length + max(1, (self.shape.depth - 1) * self.shape.width)

    def cache_bytes(self, batch: int, slots: int) -> int:
        return self.model.cache_bytes(batch, self.slots(slots))

    @property
    def shared_cache_bytes(self) -> int:
        return self.model.shared_cache_bytes

    def use_graphs(self, recorder: GraphRecorder | None) -> None:
        self.model.use_graphs(recorder)

    def describe(self) -> dict[str, Any]:
        stop = {"stop_below": self.shape.stop_below} if self.shape.stop_below else {}
        return {**super().describe(), "width": self.shape.width, **stop}
