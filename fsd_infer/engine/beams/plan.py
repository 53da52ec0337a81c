"""The choice of nodes: simulate the search's next steps with the drafter's probabilities.

A forward allows a step if it has read all beams that the step before kept. So drafts must be the beams of the next
steps, not each beam's likeliest continuations. In each simulated step, candidates of all beams compete by the beam's
score plus the drafter's log-probabilities, and the best become nodes. A node that the target has read in an earlier
round uses the target's log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fsd_infer.engine.beams.forest import Node
from fsd_infer.engine.beams.options import BeamOptions
from fsd_infer.engine.beams.proposers import Proposer
from fsd_infer.engine.beams.sampling import arrivals
from fsd_infer.engine.beams.search import Beam, Search, Terms

Look = Callable[[int, Sequence[Node]], None]


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
