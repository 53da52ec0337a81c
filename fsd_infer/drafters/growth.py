"""Growing dynamic trees (EAGLE-2, arXiv 2406.16858) with a model that has a key-value cache: a head, or a small LM.

At each depth the ``width`` nodes with the highest cumulative log q are expanded, ``width`` children each; at the
end the ``nodes`` of all candidates are kept that are visited most likely: those with the highest cumulative log q, or,
under a law that favours drafts, as :mod:`fsd_infer.drafters.visits` computes. A child's score never exceeds its
parent's, so they always form a connected tree.

Drafting may stop before the last depth (``TreeShape.stop_below``). Whether it does is, like the tree itself, a function
of the context, so no rule's law changes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.transfer import to_device
from fsd_infer.drafters.base import Drafter, DraftRequest, DraftSession
from fsd_infer.drafters.candidates import Level
from fsd_infer.drafters.estimates import PRIORS, Prior
from fsd_infer.drafters.online import RoundChoice
from fsd_infer.drafters.shape import (
    DEFAULT_SHAPES,
    LARGEST,
    LITTLE_TILT,
    LITTLE_TILT_SHAPES,
    TILTED_SHAPES,
    TreeShape,
    not_believed,
    of_device,
)
from fsd_infer.drafters.visits import tilted
from fsd_infer.targets.target import Target
from fsd_infer.tree import at_nodes, visible_slots


class TreeDrafter(Drafter):
    """Its model grows trees of a shape, or trees that are chosen round by round.

    Args:
        target: what it drafts for.
        vocabulary: entries of its distributions.
        shape: tree options; defaults by device (:data:`DEFAULT_SHAPES`, for laws that favour drafts
            :data:`TILTED_SHAPES` or :data:`LITTLE_TILT_SHAPES`).

    Attributes:
        by_default: no shape was given.
        largest: by device, what trees are chosen within.
    """

    target: Target
    largest: Mapping[str, TreeShape] = LARGEST

    def __init__(self, target: Target, vocabulary: int, shape: TreeShape | None) -> None:
        self.target, self.vocabulary = target, vocabulary
        self.by_default = shape is None
        self.shape = self._within(shape or of_device(DEFAULT_SHAPES, target.device))

    def _within(self, shape: TreeShape) -> TreeShape:
        """No node has more children than the vocabulary has entries."""
        return replace(shape, width=min(shape.width, self.vocabulary))

    def reshaped(self, shape: TreeShape) -> Self:
        """The same drafter with another tree; nothing is copied."""
        made = copy(self)
        made.shape = self._within(shape)
        made.by_default, made.choice = False, None
        return made

    def for_batch(self, batch: int, tilt: float = 0.0) -> Drafter:
        if self.by_default and tilt:
            shapes_by_device = TILTED_SHAPES if tilt > LITTLE_TILT else LITTLE_TILT_SHAPES
            return self.reshaped(of_device(shapes_by_device, self.target.device))
        return self

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def max_depth(self) -> int:
        return min(self.shape.depth, self.max_nodes - 1)

    @property
    def prior(self) -> Prior:
        """What a round is taken to cost before anything was timed."""
        return of_device(PRIORS, self.target.device)

    def slots(self, longest: int) -> int:
        """Slots for texts of up to ``longest`` tokens and for what is expanded after them."""
        return longest + max(1, (self.shape.depth - 1) * self.shape.width)

    @abstractmethod
    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """Its model's own empty key-value cache, with room for ``slots`` tokens per row."""

    def describe(self) -> dict[str, Any]:
        stop = {"stop_below": self.shape.stop_below} if self.shape.stop_below else {}
        return {**super().describe(), "width": self.shape.width, **stop}


class TreeSession(DraftSession):
    """Holds the cache: the text's tokens lie in slots of their own numbers, expanded nodes after them, depth by depth.

    ``lengths`` [B], on the CPU, counts the text's slots, the root's included.
    """

    def __init__(self, drafter: TreeDrafter, request: DraftRequest, device: torch.device) -> None:
        self.shape, self.device = drafter.shape, device
        self.cache = drafter.new_cache(request.batch, drafter.slots(request.slots))
        self.tilt, self.choice = request.tilt, request.choice
        self.lengths = torch.zeros(request.batch, dtype=torch.long)
        self.width = drafter.shape.width  # children of an expanded node
        self.looks = self.choice is not None and self.choice.watches  # at each depth, to choose what is expanded

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.lengths = self.lengths[rows]

    @abstractmethod
    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Read the nodes that are expanded next; the cache knows their slots.

        Args:
            tokens, positions: [B, E].
            parents: [B, E] their parents' places among the nodes that were read before, or 0: the root.
            visible: [B, E, S] bool, slot s may be attended by node i.

        Returns:
            logits [B, E, Vd] of their children.
        """

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [B, E, Vd] -> (ln q [B, E, width], falling; entries of the vocabulary): the children proposed."""
        return ops.likeliest(logits, self.width)

    def _grow(self, logits: Tensor, ids: Tensor | None, depth: int) -> list[Level]:
        """Candidates depth by depth, at most ``depth`` deep.

        Args:
            logits: [B, 1, Vd] at the root, which was read.
            ids: [Vd] what they are about.
        """
        batch, device = len(self.lengths), self.device
        expanded = torch.zeros(batch, 1, dtype=torch.long, device=device)  # node numbers; the root is node 0
        path_scores = torch.zeros(batch, 1, device=device)  # their cumulative log q
        frontier = _Frontier(self.shape, self.width, self.tilt, self.choice, self.looks)
        sees = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # expanded nodes each of them descends from
        levels: list[Level] = []
        first = 1  # number of the first node of this depth
        for level in range(1, depth + 1):
            log_q, entries = self._candidates(logits)  # [B, E, w]
            tokens = (entries if ids is None else ids[entries]).flatten(1)
            scores = (path_scores[..., None] + log_q).flatten(1)
            levels.append(Level(tokens, scores, expanded, path_scores, logits))
            if level == depth:
                break
            best = frontier.next(log_q, scores)  # [B, E] of the candidates, to be expanded
            if best is None:
                break
            path_scores = scores.gather(1, best)
            own = torch.eye(best.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)
            parents = best // self.width  # which of the E expanded nodes each frontier node hangs under
            sees = torch.cat([at_nodes(sees, parents), own], dim=-1)
            logits = self._expand(tokens.gather(1, best), parents, sees, level)
            expanded = first + best
            first += tokens.shape[1]
        return levels

    def _expand(self, tokens: Tensor, parents: Tensor, sees: Tensor, depth: int) -> Tensor:
        """Run the model on one frontier [B, E]; its keys go after the text and after earlier frontiers."""
        slots = self.lengths[:, None] + torch.arange(sees.shape[2] - tokens.shape[1], sees.shape[2])
        positions = (self.lengths + depth - 1)[:, None].expand_as(slots)
        first, visible = int(slots[0, 0]), visible_slots(self.lengths, sees)
        positions, slots = to_device(positions, self.device), to_device(slots, self.device)
        self.cache.set_write_slots(slots, first if slots.shape[0] == 1 else None, visible.shape[-1])
        return self._read_nodes(tokens, parents, positions, visible)


class _Frontier:
    """Which candidates are expanded next: the ``width`` likeliest until ``stop_below``, or what a choice says."""

    def __init__(self, shape: TreeShape, width: int, tilt: float, choice: RoundChoice | None, looks: bool) -> None:
        self.stop_below, self.width, self.tilt, self.choice, self.looks = shape.stop_below, width, tilt, choice, looks
        self._visits: Tensor | None = None  # [B, E] tilted scores of the nodes that were expanded last

    def next(self, log_q: Tensor, scores: Tensor) -> Tensor | None:
        """Places [B, E'] among the candidates, None where drafting stops.

        Args:
            log_q: [B, E, w] ln q of the candidates, the likeliest of each node first.
            scores: [B, E * w] cumulative.
        """
        if self.choice is not None and self.looks:
            chosen = self.choice.expand(log_q.tolist())
            return torch.tensor(chosen, device=scores.device) if chosen else None
        best = scores.topk(self.width, dim=-1).indices
        if self.stop_below:
            steps = tilted(log_q, self.tilt)
            visits = steps if self._visits is None else self._visits[..., None] + steps
            self._visits = visits.flatten(1).gather(1, best)
            if not_believed(self._visits, self.stop_below):
                return None
        if self.choice is not None:
            self.choice.count(best.shape[1])
        return best
