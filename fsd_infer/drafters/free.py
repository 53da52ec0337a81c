"""Drafters without a model: tables of what may follow a text's last tokens."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fsd_infer.drafters.base import DRAFTERS, Drafter
from fsd_infer.drafters.shape import TreeShape, check_tree
from fsd_infer.errors import FsdError
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree, Nodes

PRIOR_TRIALS = 4.0  # what a prior counts for
Options = list[tuple[int, float]]  # different tokens, and chances that add up to at most 1


class Chance:
    """How often guesses of a kind are right: (prior hits + hits) / (prior trials + trials), both counts fading.

    Args:
        prior: taken for it at first.
        memory: trials beyond which evidence makes older evidence fade.
        weight: trials that the prior counts for.
    """

    def __init__(self, prior: float, memory: float, weight: float = PRIOR_TRIALS) -> None:
        self.hits, self.trials, self.memory = weight * prior, weight, memory

    @property
    def value(self) -> float:
        """Strictly between 0 and 1."""
        return self.hits / self.trials

    def learn(self, right: bool) -> None:
        fade = 1.0 if self.trials < self.memory else 1.0 - 1.0 / self.memory
        self.hits, self.trials = self.hits * fade + right, self.trials * fade + 1.0
        # never certain either way: a score must fall from parent to child, and a chance must be able to recover
        self.hits = min(max(self.hits, 0.01), self.trials - 0.05)


class Table(Protocol):
    """What is known of one text. What it knows a context by is its own affair."""

    def at(self, context: Sequence[int]) -> Any:
        """What it knows the context by that ends with these tokens."""

    def step(self, place: Any, token: int) -> Any:
        """The same with one token more."""

    def options(self, place: Any) -> Options:
        """What may follow."""


def best_first(table: Table, place: Any, root: int, nodes: int, depth: int, least: float) -> Nodes:
    """The most promising continuations of a text as a tree, best first.

    Args:
        table: of the text.
        place: what the table knows the text by.
        root: the text's last token.
        nodes: most nodes, the root included.
        depth: deepest node.
        least: chance of acceptance below which a node is not worth its verification.
    """
    tokens, parents, scores, depths = [root], [0], [0.0], [0]
    queue: list[tuple[float, int, int, int, Any]] = []  # -score, order of arrival, parent, token, parent's place
    arrivals, lowest = 0, math.log(least)
    node = 0
    while True:
        if place is not None:
            for token, chance in table.options(place):
                score = scores[node] + math.log(chance)
                if score >= lowest:
                    arrivals += 1
                    heapq.heappush(queue, (-score, arrivals, node, token, place))
        if not queue or len(tokens) == nodes:
            return tokens, parents, scores
        negative, _, parent, token, above = heapq.heappop(queue)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        depths.append(depths[parent] + 1)
        place = table.step(above, token) if depths[node] < depth and len(tokens) < nodes else None


class FreeDrafter(Drafter):
    """A drafter that needs neither weights nor features. By name ("X+NAME") it can be grafted onto X's tree.

    Args:
        vocab_size: V of the target.
        depth: deepest draft (number of tokens ahead of the root).
        nodes: most nodes verified per round, the root included.
        least: a node whose estimated chance of acceptance is lower is not drafted, in (0, 1).

    Attributes:
        reach: tokens of a context that its tables look at.
        most_chosen: nodes that it drafts at least, where what is verified of them is chosen round by round.

    Raises:
        FsdError: options out of range.
    """

    reach: ClassVar[int]
    most_chosen: ClassVar[int] = 0

    @abstractmethod
    def __init__(self, vocab_size: int, depth: int, nodes: int, least: float) -> None:
        check_tree(self.name, depth, nodes)
        if not 0.0 < least < 1.0:
            raise FsdError(f"{self.name} needs 0 < least < 1; got {least}.")
        self.vocab_size, self.depth, self.nodes, self.least = vocab_size, depth, nodes, least

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.nodes - 1)

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        kind, colon, option = str(name).partition(":")
        if kind != cls.name:
            return None
        made: Any = cls
        options = {} if tree is None else {"nodes": tree.nodes}
        return made(target.vocab_size, **options, **(cls.option(option, target) if colon else {}))

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        """The arguments that "NAME:TEXT" stands for. Raises FsdError for what is no option."""
        raise FsdError(f"drafter {cls.name} takes no option, got {cls.name}:{text!s:.80}. Name {cls.name} alone.")

    def trees(self, tables: Sequence[Table], places: Sequence[Any], roots: Tensor, device: torch.device) -> DraftTree:
        """A tree of each text's table, under its last token; roots [B] on the CPU."""
        limits = self.nodes, self.depth, self.least
        rows = [best_first(*row, *limits) for row in zip(tables, places, roots.tolist(), strict=True)]
        return DraftTree.of_lists(rows, self.vocab_size, device)


def free_drafters() -> dict[str, type[FreeDrafter]]:
    """The registered drafters without a model, by name."""
    return {name: kind for name in DRAFTERS if issubclass(kind := DRAFTERS.get(name), FreeDrafter)}
