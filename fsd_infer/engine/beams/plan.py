"""The choice of nodes to draft: the search's next steps, simulated with the drafter's probabilities.

A forward allows a step if it has read all beams that the step before kept. So drafts must be the beams of the next
steps, not each beam's likeliest continuations. In each simulated step, candidates of all beams compete by the beam's
score plus the drafter's log-probabilities, and the best become nodes. A node that the target has read in an earlier
round uses the target's log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsd_infer.drafters.frontier import NO_SUCCESSORS, Frontier
from fsd_infer.drafters.session import DraftSession
from fsd_infer.engine.beams.options import BeamOptions
from fsd_infer.engine.beams.sampling import first_arrivals
from fsd_infer.engine.beams.search import Beam, Draw, Search, SearchParameters


class Planner:
    """The choice of each round's nodes.

    Args:
        parameters: the request's parameters.
        options: with ``depth`` and ``spread``.
        session: the drafter's.
        list_likely: ``list_likely(search, nodes)`` lists ``likely`` of nodes that the target has read.
        list_size: how many successors of a node are listed.
    """

    def __init__(
        self,
        parameters: SearchParameters,
        options: BeamOptions,
        session: DraftSession,
        list_likely: Callable[[Search, Sequence[int]], None],
        list_size: int,
    ) -> None:
        self.parameters, self.options, self.session = parameters, options, session
        self.list_likely, self.list_size = list_likely, list_size
        self.nodes = options.most_nodes(parameters.beams)

    def plan(self, searches: Sequence[Search], frontier: Frontier) -> None:
        """Append drafts to the nodes of each search, which the frontier shows."""
        most = [len(search.tokens) + self.nodes for search in searches]
        frontiers = [list(search.live) for search in searches]
        for level in range(1, (self.options.depth or 0) + 1):
            for row, search in enumerate(searches):
                # the last step needs no further reading
                if search.length + level >= search.limit or len(search.tokens) >= most[row]:
                    frontiers[row] = []
            if not any(frontiers):
                break
            self._ask(searches, frontier, frontiers)
            for row, search in enumerate(searches):
                likely = self._next_beams(search, frontiers[row], search.max_beams(search.length + level))
                frontiers[row] = [
                    Beam(search.child(parent, token), score)
                    for score, parent, token in likely
                    if len(search.tokens) < most[row] or (parent, token) in search.children
                ]

    def _ask(self, searches: Sequence[Search], frontier: Frontier, frontiers: Sequence[Sequence[Beam]]) -> None:
        """List what is likely after all these nodes, by the target or by the drafter."""
        for search, beams in zip(searches, frontiers, strict=True):
            self.list_likely(search, [beam.node for beam in beams if beam.node < search.read])
        unread = [
            [beam.node for beam in beams if beam.node >= search.read]
            for search, beams in zip(searches, frontiers, strict=True)
        ]
        if any(unread):
            guesses_of = self.session.successors(frontier, unread, self.list_size)
            for search, nodes, guesses in zip(searches, unread, guesses_of, strict=True):
                for node, guess in zip(nodes, guesses, strict=True):
                    search.successors[node].proposed = guess

    def _next_beams(self, search: Search, beams: Sequence[Beam], width: int) -> list[Draw]:
        """Return score, parent and token of the likely beams of the next step, which keeps ``width``."""
        successors = [search.successors[beam.node] for beam in beams]
        lists = [of.likely or of.proposed or NO_SUCCESSORS for of in successors]
        if self.parameters.draw is None or not beams:
            draws = [
                (beam.score + value, beam.node, token)
                for beam, guess in zip(beams, lists, strict=True)
                for value, token in zip(*guess)
            ]
        else:
            hashes, scores = [search.text_hashes[beam.node] for beam in beams], [beam.score for beam in beams]
            arrived = first_arrivals(hashes, scores, lists, self.parameters.candidates * width)
            draws = [(scores[index] + value, beams[index].node, token) for _, index, token, value in arrived]
        continuing = [draw for draw in draws if draw[2] not in self.parameters.eos_token_ids]
        return sorted(continuing, key=lambda draw: -draw[0])[: self.options.breadth(width)]
