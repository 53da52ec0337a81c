"""Drafters without a model: tables of what may follow a text's last tokens."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

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
    """

    def __init__(self, prior: float, memory: float) -> None:
        self.hits, self.trials, self.memory = PRIOR_TRIALS * prior, PRIOR_TRIALS, memory

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
    """What is known of one text."""

    def options(self, context: Sequence[int]) -> Options:
        """What may follow the last tokens of the text, or of text and drafts."""


def best_first(
    options: Callable[[Sequence[int]], Options],
    context: Sequence[int],
    reach: int,
    nodes: int,
    depth: int,
    least: float,
) -> Nodes:
    """The most promising continuations of a text as a tree, best first.

    Args:
        options: see :class:`Table`.
        context: the text's last tokens; the last is the root.
        reach: as many of them ``options`` looks at.
        nodes: most nodes, the root included.
        depth: deepest node.
        least: chance of acceptance below which a node is not worth its verification.
    """
    tokens, parents, scores, depths = [context[-1]], [0], [0.0], [0]
    queue: list[tuple[float, int, int, int, list[int]]] = []  # -score, order of arrival, parent, token, context
    arrivals = 0

    def branch(node: int, context: list[int]) -> None:
        nonlocal arrivals
        for token, chance in options(context):
            score = scores[node] + math.log(chance)
            if score >= math.log(least):
                arrivals += 1
                heapq.heappush(queue, (-score, arrivals, node, token, context))

    branch(0, list(context))
    while queue and len(tokens) < nodes:
        negative, _, parent, token, before = heapq.heappop(queue)
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        depths.append(depths[parent] + 1)
        if depths[-1] < depth:
            branch(len(tokens) - 1, [*before, token][-reach:])
    return tokens, parents, scores


class FreeDrafter(Drafter):
    """A drafter that needs neither weights nor features. By name ("X+NAME") it can be grafted onto X's tree.

    Args:
        vocab_size: V of the target.
        depth: deepest draft (number of tokens ahead of the root).
        nodes: most nodes verified per round, the root included.
        width: most children of a node by one context.
        least: a node whose estimated chance of acceptance is lower is not drafted, in (0, 1).

    Attributes:
        reach: tokens of a context.

    Raises:
        FsdError: options out of range.
    """

    reach: ClassVar[int]

    @abstractmethod
    def __init__(self, vocab_size: int, depth: int, nodes: int, width: int, least: float) -> None:
        check_tree(self.name, depth, nodes, width)
        if not 0.0 < least < 1.0:
            raise FsdError(f"{self.name} needs 0 < least < 1; got {least}.")
        self.vocab_size, self.depth, self.nodes, self.width, self.least = vocab_size, depth, nodes, width, least

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.nodes - 1)

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        if name != cls.name:
            return None
        made: Any = cls
        return made(target.vocab_size) if tree is None else made(target.vocab_size, nodes=tree.nodes)

    def trees(self, tables: Sequence[Table], contexts: Sequence[Sequence[int]], device: torch.device) -> DraftTree:
        """A tree of each text's table, under the last of its last tokens."""
        limits = self.reach, self.nodes, self.depth, self.least
        rows = [best_first(table.options, context, *limits) for table, context in zip(tables, contexts, strict=True)]
        return DraftTree.of_lists(rows, self.vocab_size, device)


def free_drafters() -> dict[str, type[FreeDrafter]]:
    """The registered drafters without a model, by name."""
    return {name: kind for name in DRAFTERS if issubclass(kind := DRAFTERS.get(name), FreeDrafter)}
