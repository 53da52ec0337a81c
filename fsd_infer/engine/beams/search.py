"""One prompt's beam search, step by step as in transformers' ``_beam_search``.

Its nodes are those of one row of a :class:`.Frontier`: below the last token that all live beams share, the beams, what
lies above them, and what the target has read below them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from fsd_infer.drafters.frontier import NO_SUCCESSORS, Successors
from fsd_infer.engine.stats import RowRecord
from fsd_infer.trees.tree import path_to

Draw = tuple[float, int, int]  # score, beam, token


class Beam(NamedTuple):
    """An unfinished text, and the sum of its processed log-probabilities."""

    node: int
    score: float


class Hypothesis(NamedTuple):
    """A finished answer, and its score: the sum of its processed log-probabilities / length ** length_penalty."""

    score: float
    tokens: list[int]
    stopped: bool  # by an EOS token or a stopping criterion, else by its length


@dataclass(frozen=True)
class SearchParameters:
    """The parameters that a request's beam searches share.

    Attributes:
        beams: W.
        eos_token_ids: tokens that end an answer.
        length_penalty: as in ``GenerationConfig``.
        early_stopping: as in ``GenerationConfig``.
        stops: ``stops(prompt's index, texts)`` -> [K], whether stopping criteria end each of K texts (tokens after the
            prompt); None: there are no criteria.
        draw: for beam sampling, ``draw(search, count)`` -> ordered candidates; None: take the likeliest.
        width: dynamic width of the next step of a search; None: W.
        join_every: keep only one beam after every this many steps; None: never.
    """

    beams: int
    eos_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stops: Callable[[int, list[list[int]]], list[bool]] | None = None
    draw: Callable[[Search, int], list[Draw]] | None = None
    width: Callable[[Search], int] | None = None
    join_every: int | None = None

    @property
    def candidates(self) -> int:
        """K, candidates per step and beam: enough that W continue even if all EOS tokens are among them."""
        return max(2, 1 + len(self.eos_token_ids))


@dataclass
class NodeSuccessors:
    """The likely next tokens of a node, as far as they are known.

    Attributes:
        logits: [V] the target's; None before it has read the node.
        likely: the target's likeliest, by its processed log-probabilities; None: not listed yet.
        rest: total probability of the successors that are not in ``likely``.
        proposed: the drafter's guess of ``likely``; None: not asked.
    """

    logits: Tensor | None = None
    likely: Successors | None = None
    rest: float = 0.0
    proposed: Successors | None = None


class Search:
    """One prompt's search.

    Args:
        parameters: the request's parameters.
        prompt: token ids.
        limit: most new tokens.
        row: the prompt's index in the request.
        root_hash: hash of the root's text.

    Attributes:
        shared: the tokens after the prompt up to the root.
        tokens: token of each node, the root first.
        parents: number of each node's parent; the root's is 0.
        text_hashes: a 64-bit hash of each node's text.
        successors: the successors of each node.
        children: the nodes by parent and token.
        read: number of leading nodes that the target has read.
        live: the beams, best first.
        finished: the best W finished answers so far, best first.
        length: new tokens of the live beams.
        settled: the same before the last steps. The root stays within it, since a drafter reads nodes before they
            become text.
        done: whether the search has ended.
        record: the record of the best answer, complete once the search has ended.
    """

    def __init__(self, parameters: SearchParameters, prompt: list[int], limit: int, row: int, root_hash: int) -> None:
        self.parameters, self.prompt, self.limit, self.row = parameters, prompt, limit, row
        self.shared: list[int] = []
        self.tokens, self.parents, self.text_hashes, self.successors = prompt[-1:], [0], [root_hash], [NodeSuccessors()]
        self.children: dict[tuple[int, int], int] = {}
        self.read = 0
        self.live = [Beam(0, 0.0)]
        self.finished: list[Hypothesis] = []
        self.length = self.settled = 0
        self.done = False
        self.record = RowRecord()

    # nodes

    def child(self, parent: int, token: int) -> int:
        """Return the node of this successor, created on first use."""
        node = self.children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.text_hashes.append(hash((self.text_hashes[parent], token)))
            self.successors.append(NodeSuccessors())
        return node

    def text(self, node: int) -> list[int]:
        """Return the tokens after the prompt up to this node's."""
        return self.shared + [self.tokens[above] for above in path_to(node, self.parents)]

    def likely(self, node: int) -> Successors:
        """Return the target's likely successors of a node that it has read."""
        return self.successors[node].likely or NO_SUCCESSORS

    def prune(self, slots: int) -> tuple[list[int], int]:
        """Drop all nodes but the live beams, those above, and read ones below.

        Args:
            slots: if prompt and nodes take more slots than this, those below the beams go, too.

        Returns:
            The nodes that are left, without the root, in their new order, and how many of them have become text. The
            last of these is the new root.
        """
        if self.done:
            return [], 0
        live, paths = {beam.node for beam in self.live}, [path_to(beam.node, self.parents)[:-1] for beam in self.live]
        common = [nodes[0] for nodes in takewhile(lambda nodes: len(set(nodes)) == 1, zip(*paths))]
        grown = common[: self.settled - len(self.shared)]
        held, below = {0}.union(live, *paths), set[int]()
        for node, parent in enumerate(self.parents):
            if node and (parent in live or parent in below):
                below.add(node)
        for node in held - live:
            self.successors[node] = NodeSuccessors()  # frees its logits
        if len(self.prompt) + len(self.shared) + len(held) + len(below) <= slots:
            held |= below
        left = grown + sorted(held - {0, *grown})
        self.shared += [self.tokens[node] for node in grown]
        self._renumber([[0, *grown][-1], *left[len(grown) :]])
        return left, len(grown)

    def _renumber(self, nodes: list[int]) -> None:
        """Keep these nodes, the new root first, in this order."""
        new_node = {node: index for index, node in enumerate(nodes)}
        self.read = sum(node < self.read for node in nodes)
        self.live = [Beam(new_node[beam.node], beam.score) for beam in self.live]
        self.parents = [0, *(new_node[self.parents[node]] for node in nodes[1:])]
        self.tokens = [self.tokens[node] for node in nodes]
        self.text_hashes = [self.text_hashes[node] for node in nodes]
        self.successors = [self.successors[node] for node in nodes]
        self.children = {(self.parents[node], self.tokens[node]): node for node in range(1, len(nodes))}

    # steps

    def advance(self, list_likely: Callable[[Search, Sequence[int]], None]) -> None:
        """Take all steps that the target's reading allows; ``list_likely`` lists what is likely after nodes."""
        self.settled = self.length
        while not self.done:
            list_likely(self, [beam.node for beam in self.live if beam.node < self.read])
            if not self.step():
                break

    def step(self) -> bool:
        """Take one step if the target has read all live beams; return whether it did."""
        if any(beam.node >= self.read for beam in self.live):
            return False
        width, last = self._width(), self.length + 1 >= self.limit
        candidates = self._candidates(self.parameters.candidates * width)
        ends = self._ends(candidates, last)
        continuing = [draw for draw, end in zip(candidates, ends) if not end]
        # as in transformers, finished candidates count among the first W only
        self._finish([draw for draw, end in zip(candidates[:width], ends) if end], last)
        best = sorted(continuing, key=lambda draw: -draw[0])[:width]
        self.live = [Beam(self.child(self.live[beam].node, token), score) for score, beam, token in best]
        self.length += 1
        self.done = last or not self.live or self._decided()
        return True

    def max_beams(self, step: int) -> int:
        """Return the most beams that this step keeps; steps count from 1."""
        joins = self.parameters.join_every is not None and step % self.parameters.join_every == 0
        return 1 if joins and step < self.limit else self.parameters.beams

    def _width(self) -> int:
        most = self.max_beams(self.length + 1)
        if self.parameters.width is None or most == 1 or self.length + 1 >= self.limit:
            return most
        return self.parameters.width(self)

    def _candidates(self, count: int) -> list[Draw]:
        """Return the likeliest successors of the live beams or, in beam sampling, drawn ones in their order."""
        if self.parameters.draw is not None:
            return self.parameters.draw(self, count)
        candidates: list[Draw] = []
        for index, beam in enumerate(self.live):
            values, tokens = self.likely(beam.node)
            scores = array("f", [beam.score + value for value in values])  # sums in fp32, as in transformers
            candidates += [(score, index, token) for score, token in zip(scores, tokens)]
        return sorted(candidates, key=lambda draw: -draw[0])[:count]  # stable: of equals, the better beam's is first

    def _ends(self, candidates: Sequence[Draw], last: bool) -> list[bool]:
        """Return which candidates end an answer."""
        ends = [last or token in self.parameters.eos_token_ids for _, _, token in candidates]
        if self.parameters.stops is None or not candidates:
            return ends
        texts = {beam: self.text(self.live[beam].node) for _, beam, _ in candidates}
        stops = self.parameters.stops(self.row, [[*texts[beam], token] for _, beam, token in candidates])
        return [end or stop for end, stop in zip(ends, stops)]

    def _finish(self, ended: Sequence[Draw], last: bool) -> None:
        """Keep the best W answers."""
        if not ended:
            return
        divisor = (self.length + 1) ** self.parameters.length_penalty
        for score, beam, token in ended:
            stopped = not last or token in self.parameters.eos_token_ids
            (penalised,) = array("f", [score / divisor])
            self.finished.append(Hypothesis(penalised, [*self.text(self.live[beam].node), token], stopped))
        self.finished.sort(key=lambda answer: -answer.score)
        del self.finished[self.parameters.beams :]

    def _decided(self) -> bool:
        """Whether the finished answers are final, by the rules of ``early_stopping``."""
        if len(self.finished) < self.parameters.beams:
            return False
        if self.parameters.early_stopping is True:
            return True
        hopeful = self.parameters.early_stopping == "never" and self.parameters.length_penalty > 0.0
        length = self.limit if hopeful else self.length
        return self.live[0].score / length**self.parameters.length_penalty <= self.finished[-1].score
