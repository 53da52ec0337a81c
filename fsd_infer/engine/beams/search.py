"""One prompt's beam search, step by step as in transformers' ``_beam_search``, and the choice of nodes to draft.

The choice simulates the search's next steps with the drafter's probabilities. A forward allows a step if it has read
all beams that the step before kept. So drafts must be the beams of the next steps, not each beam's likeliest
continuations. In each simulated step, candidates of all beams compete by the beam's score plus the drafter's
log-probabilities, and the best become nodes. A node that the target has read in an earlier round uses the target's
log-probabilities.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsd_infer.engine.beams.forest import Forest, Node
from fsd_infer.engine.beams.options import BeamOptions
from fsd_infer.engine.beams.proposers import Proposer
from fsd_infer.engine.beams.sampling import Draw, arrivals
from fsd_infer.engine.stats import RowRecord

Look = Callable[[int, Sequence[Node]], None]


class Beam(NamedTuple):
    """An unfinished text, and the sum of its processed log-probabilities."""

    node: Node
    score: float


class Hypothesis(NamedTuple):
    """A finished answer, and its score: the sum of its processed log-probabilities / length ** length_penalty."""

    score: float
    tokens: list[int]
    stopped: bool  # by an EOS token or a stopping criterion, else by its length


@dataclass(frozen=True)
class Terms:
    """The parameters that a request's beam searches share.

    Attributes:
        beams: W.
        eos_token_ids: tokens that end an answer.
        length_penalty: as in ``GenerationConfig``.
        early_stopping: as in ``GenerationConfig``.
        stops: ``stops(prompt's index, texts)`` -> [K], whether stopping criteria end each of K texts (tokens after the
            prompt); None: there are no criteria.
        draw: for beam sampling, ``draw(prompt's index, live beams, count)`` -> ordered candidates; None: take the
            likeliest.
        width: dynamic width of the next step, given the live beams; None: W.
        join_every: keep one beam alone after every this many steps; None: never.
    """

    beams: int
    eos_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stops: Callable[[int, list[list[int]]], list[bool]] | None = None
    draw: Callable[[int, Sequence[Beam], int], list[Draw]] | None = None
    width: Callable[[Sequence[Beam]], int] | None = None
    join_every: int | None = None

    @property
    def candidates(self) -> int:
        """K, candidates per step and beam: enough that W continue even if all EOS tokens are among them."""
        return max(2, 1 + len(self.eos_token_ids))


class Search:
    """One prompt's search.

    Args:
        terms: of the request.
        forest: the prompt's.
        limit: most new tokens.
        row: the prompt's index in the request.

    Attributes:
        live: the beams, best first.
        finished: the best W finished answers so far, best first.
        length: new tokens of the live beams.
        done: whether the search has ended.
        record: of the best answer, complete once the search has ended.
    """

    def __init__(self, terms: Terms, forest: Forest, limit: int, row: int) -> None:
        self.terms, self.forest, self.limit, self.row = terms, forest, limit, row
        self.live = [Beam(forest.trunk[0], 0.0)]
        self.finished: list[Hypothesis] = []
        self.length = 0
        self.done = False
        self.record = RowRecord()

    def step(self) -> bool:
        """Take one step if the target has read all live beams; return whether it did."""
        if any(beam.node.likely is None for beam in self.live):
            return False
        width, last = self._width(), self.length + 1 >= self.limit
        candidates = self._candidates(self.terms.candidates * width)
        ends = self._ends(candidates, last)
        going = [draw for draw, end in zip(candidates, ends) if not end]
        # as in transformers, finished candidates count among the first W only
        self._finish([draw for draw, end in zip(candidates[:width], ends) if end], last)
        best = sorted(going, key=lambda draw: -draw[0])[:width]
        self.live = [Beam(self.live[beam].node.child(token), score) for score, beam, token in best]
        self.length += 1
        self.forest.prune([beam.node for beam in self.live])
        self.done = last or not self.live or self._decided()
        return True

    def most_kept(self, step: int) -> int:
        """Return the most beams that this step keeps; steps count from 1."""
        joins = self.terms.join_every is not None and step % self.terms.join_every == 0
        return 1 if joins and step < self.limit else self.terms.beams

    def _width(self) -> int:
        most = self.most_kept(self.length + 1)
        if self.terms.width is None or most == 1 or self.length + 1 >= self.limit:
            return most
        return self.terms.width(self.live)

    def _candidates(self, count: int) -> list[Draw]:
        """Return the likeliest successors of the live beams or, in beam sampling, drawn ones in their order."""
        if self.terms.draw is not None:
            return self.terms.draw(self.row, self.live, count)
        candidates: list[Draw] = []
        for place, beam in enumerate(self.live):
            values, tokens = beam.node.likely or ([], [])
            scores = array("f", [beam.score + value for value in values])  # sums in fp32, as in transformers
            candidates += [(score, place, token) for score, token in zip(scores, tokens)]
        return sorted(candidates, key=lambda draw: -draw[0])[:count]  # stable: of equals, the better beam's is first

    def _ends(self, candidates: Sequence[Draw], last: bool) -> list[bool]:
        """Return which candidates end an answer."""
        ends = [last or token in self.terms.eos_token_ids for _, _, token in candidates]
        if self.terms.stops is None or not candidates:
            return ends
        texts = {beam: self.live[beam].node.text() for _, beam, _ in candidates}
        stops = self.terms.stops(self.row, [[*texts[beam], token] for _, beam, token in candidates])
        return [end or stop for end, stop in zip(ends, stops)]

    def _finish(self, ended: Sequence[Draw], last: bool) -> None:
        """Keep the best W answers."""
        if not ended:
            return
        divisor = (self.length + 1) ** self.terms.length_penalty
        for score, beam, token in ended:
            stopped = not last or token in self.terms.eos_token_ids
            (penalised,) = array("f", [score / divisor])
            self.finished.append(Hypothesis(penalised, [*self.live[beam].node.text(), token], stopped))
        self.finished.sort(key=lambda answer: -answer.score)
        del self.finished[self.terms.beams :]

    def _decided(self) -> bool:
        """Whether the finished answers are final, by the rules of ``early_stopping``."""
        if len(self.finished) < self.terms.beams:
            return False
        if self.terms.early_stopping is True:
            return True
        hopeful = self.terms.early_stopping == "never" and self.terms.length_penalty > 0.0
        length = self.limit if hopeful else self.length
        return self.live[0].score / length**self.terms.length_penalty <= self.finished[-1].score


def most_nodes(options: BeamOptions, beams: int) -> int:
    """Return the most nodes of a round, besides the beams' own. ``options`` need ``depth`` and ``spread``."""
    assert options.depth is not None and options.spread is not None
    return options.depth * math.ceil(options.spread * beams) if options.nodes is None else options.nodes


class Planner:
    """The choice of each round's nodes.

    Args:
        terms: of the request.
        options: with ``depth`` and ``spread``.
        proposer: of the drafter.
        look: ``look(prompt's index, nodes)`` sets ``likely`` of nodes that the target has read.
        successors: how many successors of a node are listed.
    """

    def __init__(self, terms: Terms, options: BeamOptions, proposer: Proposer, look: Look, successors: int) -> None:
        assert options.depth is not None and options.spread is not None
        self.terms, self.proposer, self.look, self.successors = terms, proposer, look, successors
        self.depth, self.spread = options.depth, options.spread
        self.nodes = most_nodes(options, terms.beams)

    def breadth_of(self, width: int) -> int:
        """Return the number of nodes for a step that keeps ``width`` beams."""
        return math.ceil(self.spread * width)

    def plan(self, searches: Sequence[Search]) -> list[list[Node]]:
        """Choose and place the nodes that the target reads for each search: unread beams, then drafts."""
        unread = [[beam.node for beam in search.live if not beam.node.verified] for search in searches]
        for search, nodes in zip(searches, unread):
            search.forest.make_room(len(nodes) + self.nodes, [beam.node for beam in search.live])
            for node in nodes:
                search.forest.place(node)
        drafts: list[list[Node]] = [[] for _ in searches]
        frontiers = [list(search.live) for search in searches]
        for level in range(1, self.depth + 1):
            for row, search in enumerate(searches):
                # the last step needs no further reading
                if search.length + level >= search.limit or len(drafts[row]) >= self.nodes:
                    frontiers[row] = []
            if not any(frontiers):
                break
            self._ask(searches, frontiers)
            for row, (search, frontier) in enumerate(zip(searches, frontiers, strict=True)):
                frontiers[row] = []
                for beam in self.next_beams(frontier, search.most_kept(search.length + level)):
                    if beam.node.slot < 0:
                        if len(drafts[row]) >= self.nodes:
                            continue
                        search.forest.place(beam.node)
                        drafts[row].append(beam.node)
                    frontiers[row].append(beam)
        return [nodes + row for nodes, row in zip(unread, drafts)]

    def _ask(self, searches: Sequence[Search], frontiers: Sequence[Sequence[Beam]]) -> None:
        """Set ``likely`` or ``proposed`` of all these nodes."""
        for search, frontier in zip(searches, frontiers, strict=True):
            self.look(search.row, [beam.node for beam in frontier if beam.node.verified])
        unread = [[beam.node for beam in frontier if not beam.node.verified] for frontier in frontiers]
        self.proposer.propose(unread, self.successors)

    def next_beams(self, frontier: Sequence[Beam], width: int) -> list[Beam]:
        """Return the likely beams of the next step, which keeps ``width``."""
        lists = [beam.node.likely or beam.node.proposed or ([], []) for beam in frontier]
        candidates = [
            (beam.score + value, place, token)
            for place, (beam, guess) in enumerate(zip(frontier, lists, strict=True))
            for value, token in zip(*guess)
        ]
        candidates.sort(key=lambda draw: -draw[0])
        if self.terms.draw is not None and candidates:
            times = arrivals([beam.node for beam in frontier], [beam.score for beam in frontier], lists).tolist()
            columns = [{token: column for column, token in enumerate(tokens)} for _, tokens in lists]
            candidates.sort(key=lambda draw: times[draw[1]][columns[draw[1]][draw[2]]])
            candidates = sorted(candidates[: self.terms.candidates * width], key=lambda draw: -draw[0])
        going = [draw for draw in candidates if draw[2] not in self.terms.eos_token_ids][: self.breadth_of(width)]
        return [Beam(frontier[place].node.child(token), score) for score, place, token in going]
