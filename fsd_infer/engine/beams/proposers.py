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
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.errors import FsdError
from fsd_core.tensors import at_nodes, lists, padded, to_device
from fsd_infer.drafters.base import Drafter, DraftRequest, NoDrafter
from fsd_infer.drafters.eagle import EagleDrafter
from fsd_infer.drafters.free import Options, Table
from fsd_infer.drafters.graft import GraftedDrafter
from fsd_infer.drafters.lm import LMDrafter, warn_context
from fsd_infer.drafters.memory import MemoryDrafter, Recall
from fsd_infer.drafters.recycle import Recycled, RecycleDrafter
from fsd_infer.drafters.translated import TranslatedDrafter
from fsd_infer.engine.beams.forest import Begun, Forest, Guess, Node, lay_out
from fsd_infer.request.prompts import read_prompts

Rows = Sequence[Sequence[Node]]  # [B] rows of nodes, some of them empty


class Proposer:
    """A drafter's state for the forests of one batch. The base class proposes nothing.

    Args:
        drafter: of a kind that :func:`proposer_of` knows.
        begun: the batch.
    """

    def __init__(self, drafter: Any, begun: Begun) -> None:
        self.drafter, self.forests = drafter, begun.forests

    def propose(self, nodes: Rows, count: int) -> None:
        """Set ``proposed`` of each node: up to ``count`` likely successors.

        All nodes are placed and unread by the target. Their parents were read by the target, or proposed for.
        """

    def observe(self, read: Rows, features: Tensor, grown: Rows) -> None:
        """Learn from a round. The default does nothing.

        Args:
            read: the nodes that the target has read.
            features: [B, M, F] of the target at these nodes; M of the longest row, others are padded.
            grown: the nodes by which each trunk grew.
        """

    def finish(self, row: int, answer: list[int]) -> None:
        """Take a finished answer, before :meth:`select` drops its row. The default does nothing."""

    def select(self, rows: Tensor) -> None:
        """Keep these prompts [B'] (ascending, on the CPU)."""


def needs_features(drafter: Drafter) -> bool:
    """Whether a drafter, or one of its parts, reads the target's features."""
    return isinstance(drafter, EagleDrafter) or any(map(needs_features, drafter.parts))


@singledispatch
def proposer_of(drafter: Drafter, begun: Begun) -> Proposer:
    """Return a drafter's proposer for a batch; ``proposer_of.register(kind)`` adds further kinds of drafters.

    Raises FsdError for an unknown kind.
    """
    raise FsdError(
        f"drafter {drafter.name or type(drafter).__name__!r} cannot draft for beams: choose another, or register a "
        "Proposer for it with fsd_infer.engine.beams.proposer_of."
    )


proposer_of.register(NoDrafter, Proposer)


# models ---------------------------------------------------------------------------------------------------------------


class _ModelProposer(Proposer, ABC):
    """A drafter with a model, which has to read a node and its ancestors first."""

    limit: float = math.inf  # positions of the model

    def propose(self, nodes: Rows, count: int) -> None:
        within = [[node for node in row if node.position < self.limit] for row in nodes]
        for node in chain.from_iterable(nodes):
            node.proposed = [], []
        if not any(within):
            return
        values, tokens = self._likeliest(within, count)
        for row, *found in zip(within, *lists(values.flatten(1), tokens.flatten(1)), strict=True):
            for place, node in enumerate(row):
                part = slice(place * values.shape[-1], (place + 1) * values.shape[-1])
                node.proposed = found[0][part], found[1][part]

    @abstractmethod
    def _likeliest(self, nodes: Rows, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens, [B, M, count] each, with M of the longest row; others are padded."""


def _unread(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes and their ancestors, as far as their final inputs are unread, parents first."""
    found: dict[Node, None] = {}
    for node in nodes:
        path = []
        for ancestor in node.path():
            if ancestor in found or ancestor.read == 2:
                break
            path.append(ancestor)
        found.update(dict.fromkeys(reversed(path)))
    return list(found)


@proposer_of.register(EagleDrafter)
class _HeadProposer(_ModelProposer):
    """An EAGLE-style head. It reads a node with its parent's feature: the target's if known, else its own estimate.

    The session reads the prompts, and has the cache and the vocabulary.
    """

    drafter: EagleDrafter

    def __init__(self, drafter: EagleDrafter, begun: Begun) -> None:
        super().__init__(drafter, begun)
        self.device = drafter.target.device
        request = DraftRequest(len(begun.forests), begun.slots, device=self.device)
        self.session = drafter.start(begun.tokens[:, 0], request)
        if int(begun.lengths.max()) > 1:
            tokens, counts = (to_device(x, self.device) for x in (begun.tokens[:, 1:], begun.lengths - 1))
            self.session.extend(tokens, begun.features[:, : tokens.shape[1]], counts)
            rows = zip(begun.tokens.tolist(), begun.lengths.tolist())
            self.session.append([row[1:length] for row, length in rows])
        unread = begun.slots - begun.features.shape[1]
        # by slot: the target's features [B, slots, F], and the head's own outputs [B, slots, H]
        self.features = torch.nn.functional.pad(begun.features, (0, 0, 0, unread))
        self.outputs = self.features.new_zeros(*self.features.shape[:2], drafter.head.config.hidden_size)

    def observe(self, read: Rows, features: Tensor, grown: Rows) -> None:
        spare = self.features.shape[1] - 1
        slots = to_device(padded([[node.slot for node in row] for row in read], spare), self.device)
        self.features.scatter_(1, slots[..., None].expand_as(features), features)

    def select(self, rows: Tensor) -> None:
        self.session.select(rows)
        rows = to_device(rows, self.device)
        self.features, self.outputs = self.features[rows], self.outputs[rows]

    def _likeliest(self, nodes: Rows, count: int) -> tuple[Tensor, Tensor]:
        unread = [_unread(row) for row in nodes]
        for known in (True, False):
            self._read([[node for node in row if _follows_read(node) is known] for row in unread], known)
        slots = to_device(padded([[node.slot for node in row] for row in nodes]), self.device)
        vocabulary = self.session.vocabulary
        logits = self.drafter.q_logits(at_nodes(self.outputs, slots), vocabulary)
        values, choice = functional.topk_logprobs(logits, min(count, logits.shape[-1]))
        ids = self.drafter.draft_ids if vocabulary is None else vocabulary.ids
        return values, choice if ids is None else ids[choice]

    def _read(self, nodes: Rows, known: bool) -> None:
        """Read nodes with their parents' features: known ones, or the head's estimates."""
        if not any(nodes):
            return
        if self.session.vocabulary is not None:
            self.session.vocabulary.extend([[node.token for node in row] for row in nodes])
        layout = lay_out(self.forests, nodes, self.device)
        if known:
            fused = self.drafter.head.config.fused_layers
            features = self.drafter.target.features_of(at_nodes(self.features, layout.before), fused)
        else:
            features = at_nodes(self.outputs, layout.before)
        # the head's slots and positions are those of the pairs (token, feature before it)
        cache, visible = self.session.cache, layout.visible[..., 1:]
        start = None if layout.start is None else layout.start - 1
        cache.set_write_slots(layout.slots - 1, start, visible.shape[-1])
        outputs = self.drafter.model.forward(cache, visible, layout.tokens, features, layout.positions - 1)
        self.outputs.scatter_(1, layout.slots[..., None].expand_as(outputs), outputs)
        for node in chain.from_iterable(nodes):
            node.read = 2 if known else 1


def _follows_read(node: Node) -> bool:
    """Whether the target has read the token before this one."""
    return node.parent is None or node.parent.verified


@proposer_of.register(LMDrafter)
class _LMProposer(_ModelProposer):
    """A small LM, which reads each node once."""

    drafter: LMDrafter

    def __init__(self, drafter: LMDrafter, begun: Begun) -> None:
        super().__init__(drafter, begun)
        self.model = drafter.model
        self.cache = self.model.new_cache(len(begun.forests), begun.slots)
        self.limit = math.inf if self.model.max_positions is None else self.model.max_positions
        if int(begun.lengths.max()) > self.limit:
            self.limit = 0  # a prompt exceeds its context, so it proposes nothing
        else:
            read_prompts(self.model, self.cache, drafter.known(begun.tokens), begun.lengths)

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def propose(self, nodes: Rows, count: int) -> None:
        if any(node.position >= self.limit for node in chain.from_iterable(nodes)):
            assert self.model.max_positions is not None
            warn_context(self.model.name, self.model.max_positions)
        super().propose(nodes, count)

    def _likeliest(self, nodes: Rows, count: int) -> tuple[Tensor, Tensor]:
        unread = [_unread(row) for row in nodes]
        layout = lay_out(self.forests, unread, self.model.device)
        self.cache.set_write_slots(layout.slots, layout.start, layout.visible.shape[-1], layout.at)
        tokens = self.drafter.known(layout.tokens)
        logits, _ = self.model.forward(tokens, layout.positions, layout.visible, self.cache)
        for node in chain.from_iterable(unread):
            node.read = 2
        where = padded([[read.index(node) for node in row] for row, read in zip(nodes, unread, strict=True)])
        logits = at_nodes(logits, to_device(where, self.model.device))[..., : self.drafter.vocabulary]
        return functional.topk_logprobs(logits, min(count, logits.shape[-1]))


@proposer_of.register(TranslatedDrafter)
def _refuse_translated(drafter: TranslatedDrafter, begun: Begun) -> Proposer:
    raise FsdError(
        f"{drafter.model.name} has another vocabulary than {drafter.target.name} and cannot draft for beams. Use a "
        'small model of the same vocabulary, a head, or "lookup+recycle".'
    )


# tables ---------------------------------------------------------------------------------------------------------------


class _TableProposer(Proposer):
    """A table of each prompt, which says what may follow the last tokens of a node's text."""

    tables: Sequence[Table]

    def propose(self, nodes: Rows, count: int) -> None:
        for table, forest, row in zip(self.tables, self.forests, nodes, strict=True):
            for node in row:
                node.proposed = _guess(table.options(table.at(_tail(forest, node, self.drafter.reach))), count)

    def select(self, rows: Tensor) -> None:
        self.tables = [self.tables[row] for row in rows.tolist()]


@proposer_of.register(MemoryDrafter)
class _MemoryProposer(_TableProposer):
    """Proposes tokens that followed the last tokens earlier: in the prompt, the beams' shared text, or a store."""

    tables: Sequence[Recall]

    def __init__(self, drafter: MemoryDrafter, begun: Begun) -> None:
        super().__init__(drafter, begun)
        self.tables = drafter.recalls(begun.keys)
        for recall, forest in zip(self.tables, begun.forests):
            for token in forest.prompt:
                recall.append(token)

    def observe(self, read: Rows, features: Tensor, grown: Rows) -> None:
        for recall, row in zip(self.tables, grown, strict=True):
            for node in row:
                recall.append(node.token)
            recall.look()

    def finish(self, row: int, answer: list[int]) -> None:
        self.drafter.remember(self.tables[row], self.forests[row].prompt, answer)


@proposer_of.register(RecycleDrafter)
class _RecycleProposer(_TableProposer):
    """What the target found likely before after the same one or two tokens."""

    tables: Sequence[Recycled]

    def __init__(self, drafter: RecycleDrafter, begun: Begun) -> None:
        super().__init__(drafter, begun)
        self.tables = drafter.tables(len(begun.forests))

    def observe(self, read: Rows, features: Tensor, grown: Rows) -> None:
        for recycled, forest, path, nodes in zip(self.tables, self.forests, grown, read, strict=True):
            for node in path:  # learn before remember() stores the answers
                if node.parent is not None:
                    recycled.learn(_tail(forest, node.parent, 2), node.token)
            for node in nodes:
                if node.likely is not None:
                    values, tokens = node.likely
                    recycled.remember(_tail(forest, node, 2), tokens[: recycled.width], [min(x, 0.0) for x in values])


def _guess(options: Options, count: int) -> Guess:
    """The ``count`` likeliest options."""
    best = sorted(options, key=lambda option: -option[1])[:count]
    return [math.log(chance) for _, chance in best], [token for token, _ in best]


def _tail(forest: Forest, node: Node, count: int) -> list[int]:
    """The last ``count`` tokens of the text that ends with a node."""
    tokens = [ancestor.token for ancestor in islice(node.path(), count)]
    return forest.prompt[max(0, len(forest.prompt) + len(tokens) - count) :] + tokens[::-1]


# two of them ----------------------------------------------------------------------------------------------------------


@proposer_of.register(GraftedDrafter)
class _GraftedProposer(Proposer):
    """The successors that either proposes. What both do has the chance 1 - (1 - a)(1 - b)."""

    def __init__(self, drafter: GraftedDrafter, begun: Begun) -> None:
        super().__init__(drafter, begun)
        self.parts = [proposer_of(part, begun) for part in (drafter.main, drafter.side)]

    def propose(self, nodes: Rows, count: int) -> None:
        missed: dict[Node, dict[int, float]] = {node: {} for node in chain.from_iterable(nodes)}
        for part in self.parts:
            part.propose(nodes, count)
            for node, of_node in missed.items():
                for value, token in zip(*(node.proposed or ([], []))):
                    of_node[token] = of_node.get(token, 1.0) * (1.0 - math.exp(min(value, 0.0)))
        for node, of_node in missed.items():
            node.proposed = _guess([(token, 1.0 - miss) for token, miss in of_node.items() if miss < 1.0], count)

    def observe(self, read: Rows, features: Tensor, grown: Rows) -> None:
        for part in self.parts:
            part.observe(read, features, grown)

    def finish(self, row: int, answer: list[int]) -> None:
        for part in self.parts:
            part.finish(row, answer)

    def select(self, rows: Tensor) -> None:
        for part in self.parts:
            part.select(rows)
