"""Drafters without a model: tables of continuations of a text's last tokens."""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Protocol

from torch import Tensor
from typing_extensions import Self

from fsd_core.errors import FsdError
from fsd_core.former import former_keywords
from fsd_infer.drafters.base import DRAFTERS, Drafter
from fsd_infer.drafters.frontier import Frontier, Successors
from fsd_infer.drafters.session import DraftRequest, DraftSession
from fsd_infer.targets.target import Target
from fsd_infer.trees.priced_growth import PricedGrowth
from fsd_infer.trees.shape import LARGEST_OF_LM, TreeShape, check_tree
from fsd_infer.trees.tree import DraftTree, Nodes

PRIOR_TRIALS = 4.0  # trials that a prior counts as
ROUNDING = 1e-6  # of a probability
Options = list[tuple[int, float]]  # distinct tokens with probabilities that add up to at most 1


class HitRate:
    """The share of right guesses of one kind: (prior hits + hits) / (prior trials + trials). Both counts fade.

    Args:
        prior: the share before the first trial.
        window: trials after which new evidence makes older evidence fade.
        weight: trials that the prior counts as.
    """

    def __init__(self, prior: float, window: float, weight: float = PRIOR_TRIALS) -> None:
        self.hits, self.trials, self.window = weight * prior, weight, window

    @property
    def value(self) -> float:
        """The share, strictly between 0 and 1."""
        return self.hits / self.trials

    def learn(self, hit: bool) -> None:
        decay = 1.0 if self.trials < self.window else 1.0 - 1.0 / self.window
        self.hits, self.trials = self.hits * decay + hit, self.trials * decay + 1.0
        # never 0 or 1: scores must fall from parent to child, and a rate must be able to recover
        self.hits = min(max(self.hits, 0.01), self.trials - 0.05)


class Table(Protocol):
    """The continuations known for one text. A state is what the table makes of the tokens before the next one."""

    def at(self, context: Sequence[int]) -> Any:
        """Return the state after a context that ends with these tokens."""

    def step(self, state: Any, token: int) -> Any:
        """Return the state after one more token."""

    def options(self, state: Any) -> Options:
        """Return the possible next tokens."""


def best_first(
    table: Table, state: Any, root: int, nodes: int, depth: int, min_accept_prob: float, vocab_size: float = math.inf
) -> Nodes:
    """Grow a tree of a text's most likely continuations, best first.

    Args:
        table: the text's table.
        state: the table's, after the text.
        root: the text's last token.
        nodes: most nodes, the root included.
        depth: depth of the deepest node.
        min_accept_prob: a node that is accepted with a smaller probability is not drafted.
        vocab_size: V, tokens are below it.

    Raises:
        FsdError: the table's options are no list of tokens with probabilities, or it offers a token twice or outside
            the vocabulary, or gives one a probability that is not above 0 and at most 1.
    """
    tokens, parents, scores, depths = [root], [0], [0.0], [0]
    queue: list[tuple[float, int, int, int, Any]] = []  # -score, order of arrival, parent, token, parent's state
    arrivals, min_score = 0, math.log(min_accept_prob)
    node = 0
    while True:
        if state is not None:
            for token, prob in _checked(table.options(state), vocab_size):
                score = scores[node] + math.log(prob)
                if score >= min_score:
                    arrivals += 1
                    heapq.heappush(queue, (-score, arrivals, node, token, state))
        if not queue or len(tokens) == nodes:
            return tokens, parents, scores
        negative, _, parent, token, parent_state = heapq.heappop(queue)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        depths.append(depths[parent] + 1)
        state = table.step(parent_state, token) if depths[node] < depth and len(tokens) < nodes else None


def _checked(options: Options, vocab_size: float) -> Options:
    """Return the options. Two siblings with the same token would be accepted twice as often as they should."""
    try:
        by_token = dict(options)
        wrong = [prob for prob in by_token.values() if not 0 < prob <= 1 + ROUNDING]
        outside = [token for token in by_token if not 0 <= token < vocab_size or isinstance(token, float)]
    except (TypeError, ValueError):
        raise FsdError(
            f"a drafter's options() returns {options!r:.80}, not a list of pairs (token, probability): [] for none."
        ) from None
    if len(by_token) < len(options):
        raise FsdError("a drafter's table offers one token twice after a text: let options() add up the probabilities.")
    if wrong:
        raise FsdError(f"a drafter's table gives a token the probability {wrong[0]}, not one above 0 and at most 1.")
    if outside:
        raise FsdError(
            f"a drafter's table offers the token {outside[0]}: give whole numbers from 0 to {vocab_size - 1}."
        )
    return options


class FreeDrafter(Drafter):
    """A drafter that needs neither weights nor features. The name "X+NAME" grafts it onto X's tree.

    Args:
        vocab_size: V, size of the target's vocabulary.
        depth: depth of the deepest draft, in tokens after the root.
        nodes: most nodes verified per round, the root included.
        min_accept_prob: a node that is accepted with a smaller estimated probability is not drafted; in (0, 1).
        width: most children per context, for the check of the shape.

    Attributes:
        largest: the largest shape, by device, within which trees are chosen round by round.
        context_length: tokens of a context that its tables read at most.
        auto_nodes: fewest nodes that it drafts, grafted, under ``tree="auto"``, which chooses among them.

    Raises:
        FsdError: an option out of range.
    """

    former_members = {"reach": "context_length", "least": "min_accept_prob", "most_chosen": "auto_nodes"}
    largest: ClassVar[Mapping[str, TreeShape]] = LARGEST_OF_LM
    relative_cost = 0.0
    context_length: ClassVar[int] = 32
    drafts_beams = True
    auto_nodes: ClassVar[int] = 0
    _origin: FreeDrafter | None = None  # the drafter that this one is a copy of

    @abstractmethod
    @former_keywords(least="min_accept_prob")
    def __init__(self, vocab_size: int, depth: int, nodes: int, min_accept_prob: float, width: int = 1) -> None:
        check_tree(self.name, depth, nodes, width)
        if not 0.0 < min_accept_prob < 1.0:
            raise FsdError(f"{self.name} needs 0 < min_accept_prob < 1; got {min_accept_prob}.")
        self.vocab_size, self.depth, self.nodes, self.min_accept_prob = vocab_size, depth, nodes, min_accept_prob

    @property
    def recording_key(self) -> Hashable:
        return self._origin or self, self.nodes

    def with_shape(self, shape: TreeShape) -> Self:
        """Return this drafter with the nodes of a shape: how deep and wide its trees are follows from its tables."""
        result = copy(self)
        result.nodes, result.bounds, result.menu = shape.nodes, None, ()
        result._origin = self._origin or self
        return result

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def max_depth(self) -> int:
        return min(self.depth, self.nodes - 1)

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        base, colon, option = str(name).partition(":")
        if free_drafters().get(base) is not cls:
            return None
        constructor: Any = cls
        options = {} if tree is None else {"nodes": tree.nodes}
        result: FreeDrafter = constructor(target.vocab_size, **options, **(cls.option(option, target) if colon else {}))
        result.name = base  # a subclass may have its parent's
        return result

    @classmethod
    def option(cls, text: str, target: Target) -> dict[str, Any]:
        """Return the arguments that "NAME:TEXT" stands for. Raises FsdError if TEXT is not an option."""
        raise FsdError(f"drafter {cls.name} takes no option, got {cls.name}:{text!s:.80}. Name {cls.name} alone.")


class FreeSession(DraftSession):
    """A session of a :class:`FreeDrafter`, whose tables hold what may follow each text. Its state lies on the host.

    Args:
        drafter: the session's drafter.
        first_tokens: as for :meth:`Drafter.start`.
        request: as for :meth:`Drafter.start`.

    Attributes:
        tails: the last tokens of each text, as many as :attr:`FreeDrafter.context_length`.
    """

    former_members = {"places": "states"}
    per_row = DraftSession.per_row | {"tails"}
    needs_report = True
    _host_inputs: Tensor | None = None  # the trees of recorded rounds

    def __init__(self, drafter: FreeDrafter, first_tokens: Tensor, request: DraftRequest) -> None:
        self.drafter, self.device, self.shape = drafter, request.device, request.shape
        self.tails: list[list[int]] = first_tokens[:, None].tolist()

    @abstractmethod
    def states(self) -> list[tuple[Table, Any]]:
        """Return the table of each text, and its state after the text."""

    def extend_on_host(self, rows: Sequence[Sequence[int]]) -> None:
        self.tails = [self._tail([*tail, *row]) for tail, row in zip(self.tails, rows, strict=True)]

    def _tail(self, tokens: list[int]) -> list[int]:
        return tokens[-self.drafter.context_length :]

    @property
    def is_recordable(self) -> bool:
        return self.shape is None

    def host_inputs(self) -> list[Tensor]:
        return [DraftTree.packed_lists(self._rows(), self.drafter.nodes)]

    def set_host_inputs(self, inputs: Iterator[Tensor] | None) -> None:
        self._host_inputs = None if inputs is None else next(inputs)

    def restart(self, fresh: FreeSession) -> None:
        vars(self).update(vars(fresh))

    def draft(self, roots: Tensor) -> DraftTree:
        drafter = self.drafter
        if self._host_inputs is not None:
            return DraftTree.of_packed(self._host_inputs, drafter.vocab_size, drafter.depth)
        rows = self._rows()
        tree = DraftTree.of_lists(rows, drafter.vocab_size, self.device, drafter.depth)
        if self.shape is None or self.prices is None:
            return tree
        self.growth = PricedGrowth(self.shape, len(rows))
        return tree.keep(self.growth.choose(tree))

    def _rows(self) -> list[Nodes]:
        """Return the tree of each row."""
        drafter = self.drafter
        limits = drafter.nodes, drafter.depth, drafter.min_accept_prob, drafter.vocab_size
        return [
            best_first(table, state, tail[-1], *limits)
            for (table, state), tail in zip(self._checked_states(), self.tails, strict=True)
        ]

    def _checked_states(self) -> list[tuple[Table, Any]]:
        states: Any = self.states()
        try:
            pairs = [(table, state) for table, state in states]
        except (TypeError, ValueError):
            pairs = []
        if len(pairs) != len(self.tails):
            raise FsdError(
                f"drafter {self.drafter.name!r}: states() returns {states!r:.80}, not a list with a pair "
                f"(table, state) for each of {len(self.tails)} texts."
            )
        return pairs

    def successors(self, frontier: Frontier, nodes: Sequence[Sequence[int]], count: int) -> list[list[Successors]]:
        rows, size = enumerate(zip(self._checked_states(), nodes, strict=True)), self.drafter.vocab_size
        return [
            [
                likeliest_of(_checked(table.options(table.at(self.context(frontier, row, node))), size), count)
                for node in of_row
            ]
            for row, ((table, _), of_row) in rows
        ]

    def context(self, frontier: Frontier, row: int, node: int) -> list[int]:
        """Return the last tokens of the text that ends with a node."""
        tokens = frontier.tokens[row]
        return self._tail([*self.tails[row], *(tokens[above] for above in frontier.path(row, node))])


def scaled(options: Options) -> Options:
    """Scale probabilities that add up to more than 1 to add up to 1."""
    total = max(1.0, sum(prob for _, prob in options))
    return [(token, prob / total) for token, prob in options]


def likeliest_of(options: Options, count: int) -> Successors:
    """Return the ``count`` likeliest options."""
    best = sorted(options, key=lambda option: -option[1])[:count]
    return [math.log(prob) for _, prob in best], [token for token, _ in best]


def free_drafters() -> dict[str, type[FreeDrafter]]:
    """Return the registered drafters without a model, by name."""
    return {name: drafter for name in DRAFTERS if issubclass(drafter := DRAFTERS.get(name), FreeDrafter)}
