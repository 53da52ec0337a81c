"""Proposers: a drafter's likely successors of the nodes of a forest, by kind of drafter.

A :class:`Drafter` of the engine grows a tree under each of B texts. Beams need the likely successors of any nodes of a
forest, level by level. A drafter with a model keeps one cache row per prompt, with the forest's slots. A table is
looked up by each node's last tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import singledispatch
from itertools import chain

import torch
from torch import Tensor

from fsd_infer.cpu import ops
from fsd_infer.device.rows import at_nodes, padded
from fsd_infer.device.transfer import lists, to_device
from fsd_infer.drafters import (
    Drafter,
    EagleDrafter,
    GraftedDrafter,
    LMDrafter,
    MemoryDrafter,
    NoDrafter,
    RecycleDrafter,
)
from fsd_infer.drafters.eagle import READ_AT_ONCE
from fsd_infer.drafters.free import Options, Table
from fsd_infer.drafters.lm import warn_context
from fsd_infer.drafters.memory import Recall
from fsd_infer.drafters.recycle import Recycled
from fsd_infer.engine.beams.forest import Begun, Forest, Guess, Node, lay_out
from fsd_infer.errors import FsdError
from fsd_infer.request.prompts import read_prompts


class Proposer:
    """A drafter's state for the forests of one batch. The base class proposes nothing."""

    def propose(self, nodes: Sequence[Sequence[Node]], count: int) -> list[list[Guess]]:
        """Return up to ``count`` likely successors of each node: [B] rows of nodes, some of them empty.

        All nodes are placed and unread by the target. Their parents were read by the target, or proposed for.
        """
        return [[([], []) for _ in row] for row in nodes]

    def observe(self, nodes: Sequence[Sequence[Node]]) -> None:
        """Learn that the target has read these nodes, [B] rows. The default does nothing."""

    def extend(self, nodes: Sequence[Sequence[Node]]) -> None:
        """Extend the text that all beams share by these nodes, [B] rows of paths. The default does nothing."""

    def finish(self, row: int, answer: list[int]) -> None:
        """Take a finished answer, before :meth:`select` drops its row. The default does nothing."""

    def select(self, rows: Tensor) -> None:
        """Keep these prompts [B'] (ascending, on the CPU)."""


def needs_features(drafter: Drafter) -> bool:
    """Whether a drafter, or one of its parts, reads the target's features."""
    return isinstance(drafter, EagleDrafter) or any(map(needs_features, drafter.parts))


@singledispatch
def proposer_of(drafter: Drafter, begun: Begun) -> Proposer:
    """Return a drafter's proposer for a batch; ``proposer_of.register`` adds further kinds of drafters.

    Raises FsdError for an unknown kind.
    """
    raise FsdError(
        f"drafter {drafter.name or type(drafter).__name__!r} cannot draft for beams: choose another, or register a "
        "Proposer for it with fsd_infer.engine.beams.proposer_of."
    )


@proposer_of.register
def _(drafter: NoDrafter, begun: Begun) -> Proposer:
    return Proposer()


# models ---------------------------------------------------------------------------------------------------------------


class _ModelProposer(Proposer, ABC):
    """A drafter with a model, which has to read a node and its ancestors first."""

    def __init__(self, begun: Begun) -> None:
        self.forests = begun.forests

    def propose(self, nodes: Sequence[Sequence[Node]], count: int) -> list[list[Guess]]:
        if not any(nodes):
            return [[] for _ in nodes]
        values, tokens = self._likeliest(nodes, count)
        count, found = values.shape[-1], zip(nodes, *lists(values.flatten(1), tokens.flatten(1)), strict=True)
        return [
            [(of_values[at : at + count], of_tokens[at : at + count]) for at in range(0, count * len(row), count)]
            for row, of_values, of_tokens in found
        ]

    @abstractmethod
    def _likeliest(self, nodes: Sequence[Sequence[Node]], count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens, [B, M, count] each, with M of the longest row; others are padded."""


def _unread(nodes: Sequence[Node], known: int) -> list[Node]:
    """Return the nodes and those of their ancestors with ``read`` below ``known``, parents first."""
    found: dict[Node, None] = {}
    for node in nodes:
        path = []
        for ancestor in node.path():
            if ancestor in found or ancestor.read >= known:
                break
            path.append(ancestor)
        found.update(dict.fromkeys(reversed(path)))
    return list(found)


class _HeadProposer(_ModelProposer):
    """An EAGLE-style head. It reads a node with its parent's feature: the target's if known, else its own estimate."""

    def __init__(self, drafter: EagleDrafter, begun: Begun) -> None:
        super().__init__(begun)
        self.drafter, self.begun = drafter, begun
        self.device = drafter.target.device
        batch = len(begun.forests)
        self.cache = drafter.new_cache(batch, begun.slots)
        self.vocabulary = drafter.context_vocabulary(batch)
        if self.vocabulary is not None:
            self.vocabulary.extend(begun.tokens, begun.lengths)
        self.outputs: Tensor | None = None  # [B, slots, H] by slot
        most = begun.tokens.shape[1] - 1
        for start in range(0, most, READ_AT_ONCE):
            count = min(READ_AT_ONCE, most - start)
            slots = (start + torch.arange(count, device=self.device)).expand(batch, -1)
            visible = torch.arange(start + count, device=self.device) <= slots[..., None]
            tokens = to_device(begun.tokens[:, start + 1 : start + 1 + count], self.device)
            features = self._of_target(self.features[:, start : start + count])
            self.cache.set_write_slots(slots, start, start + count)
            self._keep(slots + 1, drafter.run(self.cache, visible, tokens, features, slots))

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)
        self.outputs = None if self.outputs is None else self.outputs[to_device(rows, self.device)]
        if self.vocabulary is not None:
            self.vocabulary.select(rows)

    def _likeliest(self, nodes: Sequence[Sequence[Node]], count: int) -> tuple[Tensor, Tensor]:
        unread = [_unread(row, 2) for row in nodes]
        for known in (True, False):
            self._read([[node for node in row if node.follows_read is known] for row in unread], known)
        slots = padded([[node.slot for node in row] for row in nodes])
        assert self.outputs is not None
        outputs = at_nodes(self.outputs, to_device(slots, self.device))
        ids = self.drafter.draft_ids if self.vocabulary is None else self.vocabulary.ids
        logits = self.drafter.q_logits(outputs, self.vocabulary)
        values, choice = ops.likeliest(logits, min(count, logits.shape[-1]))
        return values, choice if ids is None else ids[choice]

    @property
    def features(self) -> Tensor:
        assert self.begun.features is not None
        return self.begun.features

    def _read(self, nodes: Sequence[Sequence[Node]], known: bool) -> None:
        """Read nodes with their parents' features: known ones, or the head's estimates."""
        if not any(nodes):
            return
        if self.vocabulary is not None:
            tokens = padded([[node.token for node in row] for row in nodes])
            self.vocabulary.extend(tokens, torch.tensor([len(row) for row in nodes]))
        layout = lay_out(self.forests, nodes, self.device)
        if known:
            features = self._of_target(at_nodes(self.features, layout.before))
        else:
            assert self.outputs is not None
            features = at_nodes(self.outputs, layout.before)
        # the head's slots and positions are those of the pairs (token, feature before it)
        visible = layout.visible[..., 1:]
        start = None if layout.start is None else layout.start - 1
        self.cache.set_write_slots(layout.slots - 1, start, visible.shape[-1])
        self._keep(layout.slots, self.drafter.run(self.cache, visible, layout.tokens, features, layout.positions - 1))
        for node in chain.from_iterable(nodes):
            node.read = 2 if known else 1

    def _of_target(self, features: Tensor) -> Tensor:
        """Pick the columns of the target's features that the head reads."""
        return self.drafter.target.features_of(features, self.drafter.head.config.fused_layers)

    def _keep(self, slots: Tensor, outputs: Tensor) -> None:
        """Store outputs [B, M, H] by slot."""
        if self.outputs is None:
            self.outputs = outputs.new_zeros(len(outputs), self.features.shape[1], outputs.shape[-1])
        self.outputs.scatter_(1, slots[..., None].expand_as(outputs), outputs)


@proposer_of.register
def _(drafter: EagleDrafter, begun: Begun) -> Proposer:
    return _HeadProposer(drafter, begun)


class _LMProposer(_ModelProposer):
    """A small LM, which reads each node once."""

    def __init__(self, drafter: LMDrafter, begun: Begun) -> None:
        super().__init__(begun)
        self.model, self.width, self.known = drafter.model, drafter.vocabulary, drafter.known
        self.device = drafter.model.device
        self.cache = drafter.model.new_cache(len(begun.forests), begun.slots)
        limit = self.model.max_positions
        self.limit = math.inf if limit is None else limit
        if int(begun.lengths.max()) > self.limit:
            self.limit = 0  # a prompt exceeds its context, so it proposes nothing
            warn_context(self.model.name, limit)
        else:
            read_prompts(self.model, self.cache, self.known(begun.tokens), begun.lengths)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def propose(self, nodes: Sequence[Sequence[Node]], count: int) -> list[list[Guess]]:
        within = [[node for node in row if node.position < self.limit] for row in nodes]
        if sum(map(len, within)) < sum(map(len, nodes)):
            warn_context(self.model.name, self.limit)
        guesses = map(iter, super().propose(within, count))
        return [
            [next(found) if node.position < self.limit else ([], []) for node in row]
            for row, found in zip(nodes, guesses, strict=True)
        ]

    def _likeliest(self, nodes: Sequence[Sequence[Node]], count: int) -> tuple[Tensor, Tensor]:
        unread = [_unread(row, 2) for row in nodes]
        layout = lay_out(self.forests, unread, self.device)
        self.cache.set_write_slots(layout.slots, layout.start, layout.visible.shape[-1], layout.at)
        logits, _ = self.model.forward(self.known(layout.tokens), layout.positions, layout.visible, self.cache)
        for node in chain.from_iterable(unread):
            node.read = 2
        where = padded([[read.index(node) for node in row] for row, read in zip(nodes, unread, strict=True)])
        logits = at_nodes(logits, to_device(where, self.device))[..., : self.width]
        return ops.likeliest(logits, min(count, logits.shape[-1]))


@proposer_of.register
def _(drafter: LMDrafter, begun: Begun) -> Proposer:
    return _LMProposer(drafter, begun)


# tables ---------------------------------------------------------------------------------------------------------------


class _TableProposer(Proposer):
    """A table of each prompt, which says what may follow the last tokens of a node's text."""

    tables: Sequence[Table]

    def __init__(self, forests: list[Forest], tables: Sequence[Table], reach: int) -> None:
        self.forests, self.tables, self.reach = forests, tables, reach

    def propose(self, nodes: Sequence[Sequence[Node]], count: int) -> list[list[Guess]]:
        return [
            [_guess(table.options(table.at(_tail(forest, node, self.reach))), count) for node in row]
            for table, forest, row in zip(self.tables, self.forests, nodes, strict=True)
        ]

    def select(self, rows: Tensor) -> None:
        self.tables = [self.tables[row] for row in rows.tolist()]


class _MemoryProposer(_TableProposer):
    """Proposes tokens that followed the last tokens earlier: in the prompt, the beams' shared text, or a store."""

    tables: Sequence[Recall]

    def __init__(self, drafter: MemoryDrafter, begun: Begun) -> None:
        super().__init__(begun.forests, drafter.recalls(begun.keys), drafter.reach)
        self.drafter = drafter
        for recall, forest in zip(self.tables, begun.forests):
            for token in forest.prompt:
                recall.append(token)

    def extend(self, nodes: Sequence[Sequence[Node]]) -> None:
        for recall, row in zip(self.tables, nodes, strict=True):
            for node in row:
                recall.append(node.token)
            recall.look()

    def finish(self, row: int, answer: list[int]) -> None:
        self.drafter.remember(self.tables[row], self.forests[row].prompt, answer)


@proposer_of.register
def _(drafter: MemoryDrafter, begun: Begun) -> Proposer:
    return _MemoryProposer(drafter, begun)


class _RecycleProposer(_TableProposer):
    """What the target found likely before after the same one or two tokens."""

    tables: Sequence[Recycled]

    def observe(self, nodes: Sequence[Sequence[Node]]) -> None:
        for recycled, forest, row in zip(self.tables, self.forests, nodes, strict=True):
            for node in row:
                if node.likely is not None:
                    values, tokens = node.likely
                    recycled.remember(_tail(forest, node, 2), tokens[: recycled.width], [min(x, 0.0) for x in values])

    def extend(self, nodes: Sequence[Sequence[Node]]) -> None:
        for recycled, forest, row in zip(self.tables, self.forests, nodes, strict=True):
            for node in row:
                if node.parent is not None:
                    recycled.learn(_tail(forest, node.parent, 2), node.token)


@proposer_of.register
def _(drafter: RecycleDrafter, begun: Begun) -> Proposer:
    return _RecycleProposer(begun.forests, drafter.tables(len(begun.forests)), drafter.reach)


def _guess(options: Options, count: int) -> Guess:
    """The ``count`` likeliest options."""
    best = sorted(options, key=lambda option: -option[1])[:count]
    return [math.log(chance) for _, chance in best], [token for token, _ in best]


def _tail(forest: Forest, node: Node, count: int) -> list[int]:
    """The last ``count`` tokens of the text that ends with a node."""
    tokens: list[int] = []
    for ancestor in node.path():
        tokens.append(ancestor.token)
        if len(tokens) == count:
            return tokens[::-1]
    return forest.prompt[len(tokens) - count :] + tokens[::-1]


# two of them ----------------------------------------------------------------------------------------------------------


class _GraftedProposer(Proposer):
    """The successors that either proposes. What both do has the chance 1 - (1 - a)(1 - b)."""

    def __init__(self, parts: Sequence[Proposer]) -> None:
        self.parts = parts

    def propose(self, nodes: Sequence[Sequence[Node]], count: int) -> list[list[Guess]]:
        rows = zip(*(part.propose(nodes, count) for part in self.parts), strict=True)
        return [[_united(guesses, count) for guesses in zip(*row, strict=True)] for row in rows]

    def observe(self, nodes: Sequence[Sequence[Node]]) -> None:
        for part in self.parts:
            part.observe(nodes)

    def extend(self, nodes: Sequence[Sequence[Node]]) -> None:
        for part in self.parts:
            part.extend(nodes)

    def finish(self, row: int, answer: list[int]) -> None:
        for part in self.parts:
            part.finish(row, answer)

    def select(self, rows: Tensor) -> None:
        for part in self.parts:
            part.select(rows)


def _united(guesses: Sequence[Guess], count: int) -> Guess:
    missed: dict[int, float] = {}
    for guess in guesses:
        for value, token in zip(*guess):
            missed[token] = missed.get(token, 1.0) * (1.0 - math.exp(min(value, 0.0)))
    return _guess([(token, 1.0 - chance) for token, chance in missed.items() if chance < 1.0], count)


@proposer_of.register
def _(drafter: GraftedDrafter, begun: Begun) -> Proposer:
    return _GraftedProposer([proposer_of(part, begun) for part in (drafter.main, drafter.side)])
