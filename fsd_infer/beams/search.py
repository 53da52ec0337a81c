"""The bookkeeping of one prompt's beam search, as transformers' ``_beam_search`` keeps it, step by step.

A step needs what follows each live beam. A beam that the target has not read yet does not always stop it: whatever
follows that beam is no likelier than the beam itself, so candidates of other beams that beat it are beyond doubt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsd_infer.beams.forest import Forest, Node
from fsd_infer.beams.sampling import Draw


class Beam(NamedTuple):
    """A text that is still growing, and the sum of its processed log-probabilities."""

    node: Node
    score: float


class Hypothesis(NamedTuple):
    """A finished answer, and its score: the sum of its processed log-probabilities / length ** length_penalty."""

    score: float
    tokens: list[int]
    stopped: bool  # by an end-of-sequence token or a stopping criterion, else by its length


@dataclass(frozen=True)
class Terms:
    """What a request asks of its beam searches.

    Attributes:
        beams: W.
        eos_token_ids: tokens that end an answer.
        length_penalty, early_stopping: as in ``GenerationConfig``.
        stops: whether answers end by other criteria, [K] for the texts (tokens after the prompt) of K candidates of
            a prompt, by its number; None: there are no others.
        bounded: no processor can lift a log-probability above 0.
        draw: how candidates are drawn where beams are sampled, in order: ``draw(prompt's number, live beams, count)``;
            None: the likeliest are taken.
        width: dynamic width: how many beams the step after these live ones keeps; None: W.
        join_every: every so many steps one beam alone goes on; None: never.
    """

    beams: int
    eos_token_ids: frozenset[int]
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stops: Callable[[int, list[list[int]]], list[bool]] | None = None
    bounded: bool = True
    draw: Callable[[int, Sequence[Beam], int], list[Draw]] | None = None
    width: Callable[[Sequence[Beam]], int] | None = None
    join_every: int | None = None

    @property
    def candidates(self) -> int:
        """K of each step per beam: so many that, whatever ends, W go on."""
        return max(2, 1 + len(self.eos_token_ids))


class Search:
    """One prompt's search.

    Args:
        terms: of the request.
        forest: the prompt's.
        limit: most new tokens.
        row: the prompt's number in the request.

    Attributes:
        live: the beams, best first.
        finished: the best W finished answers so far, best first.
        length: new tokens of the live beams.
        done: nothing can change any more.
    """

    def __init__(self, terms: Terms, forest: Forest, limit: int, row: int) -> None:
        self.terms, self.forest, self.limit, self.row = terms, forest, limit, row
        self.live = [Beam(forest.root, 0.0)]
        self.finished: list[Hypothesis] = []
        self.length = 0
        self.done = False

    def step(self) -> bool:
        """Take one step, if what the target has read suffices for it; did it?"""
        if self.terms.draw and any(beam.node.likely is None for beam in self.live):
            return False
        width = self._width()
        count = self.terms.candidates * width
        candidates, sure = self._drawn(count) if self.terms.draw else self._likeliest(count)
        last = self.length + 1 >= self.limit
        ends = self._ends(candidates, last)
        going: list[Draw] = []
        ended: list[Draw] = []
        for place, (candidate, hit) in enumerate(zip(candidates, ends)):
            if place >= width and (last or (len(going) == width and not self.terms.draw)):
                break
            if place >= sure:
                return False
            if not hit:
                going.append(candidate)
            elif place < width:  # as in transformers, others only make room
                ended.append(candidate)
        else:
            if sure < len(candidates) or (sure < count and any(beam.node.likely is None for beam in self.live)):
                return False
        going = sorted(going, key=lambda draw: -draw[0])[:width]
        self._finish(ended, last)
        before = [beam.node for beam in self.live]
        self.live = [Beam(before[beam].child(token), score) for score, beam, token in going]
        self.length += 1
        self.forest.prune(before, [beam.node for beam in self.live])
        self.done = last or not self.live or self._decided()
        return True

    def most_kept(self, step: int) -> int:
        """Most beams that this step keeps; steps count from 1."""
        joins = self.terms.join_every is not None and step % self.terms.join_every == 0
        return 1 if joins and step < self.limit else self.terms.beams

    def _width(self) -> int:
        most = self.most_kept(self.length + 1)
        if self.terms.width is None or most == 1 or self.length + 1 >= self.limit:
            return most
        return self.terms.width(self.live)

    def _likeliest(self, count: int) -> tuple[list[Draw], int]:
        """The best candidates, and how many of them are so whatever follows the beams that are not read yet."""
        bound = -math.inf
        found: list[Draw] = []
        for place, beam in enumerate(self.live):
            if beam.node.likely is None:
                bound = max(bound, beam.score if self.terms.bounded else math.inf)
                continue
            values, tokens = beam.node.likely
            scores = array("f", [beam.score + value for value in values])  # sums in fp32, as in transformers
            found += [(score, place, token) for score, token in zip(scores, tokens)]
        found.sort(key=lambda draw: -draw[0])  # stable: at equal scores the better beam goes first
        del found[count:]
        return found, next((place for place, draw in enumerate(found) if draw[0] <= bound), len(found))

    def _drawn(self, count: int) -> tuple[list[Draw], int]:
        assert self.terms.draw is not None
        found = self.terms.draw(self.row, self.live, count)
        return found, len(found)

    def _ends(self, candidates: Sequence[Draw], last: bool) -> list[bool]:
        """Which candidates end an answer."""
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
        """Do the finished answers stand, by the rules of ``early_stopping``?"""
        if len(self.finished) < self.terms.beams:
            return False
        if self.terms.early_stopping is True:
            return True
        hopeful = self.terms.early_stopping == "never" and self.terms.length_penalty > 0.0
        length = self.limit if hopeful else self.length
        return self.live[0].score / length**self.terms.length_penalty <= self.finished[-1].score
