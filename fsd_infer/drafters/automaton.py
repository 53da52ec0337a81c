"""A suffix automaton over one or several growing texts: where a text's end occurred before, and what followed it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

HOPS = 8  # suffixes of a text whose counts a new token changes, the longest first: this bounds a token's cost

Match = tuple[int, int]  # a state, and the length of the string in it that is meant


class Automaton:
    """Every substring of its texts (Blumer et al. 1985), built online: amortised O(1) steps for a token.

    A state stands for the substrings that end at the same places. State 0 is the empty string. Texts share the
    automaton, so each sees what the others have said.

    Attributes:
        next: of each state the states that a token leads to, the token seen last at the end.
        link: the state of the longest suffix that ends at more places; -1 for state 0.
        length: of the longest string of a state.
        visits: occurrences of a state's strings. Those of the shortest suffixes of a very repetitive text are counted
            too low, see :data:`HOPS`.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.visits = [-1], [0], [0]

    def append(self, last: int, token: int) -> int:
        """Lengthen the text whose whole is state ``last`` by a token. Returns the state of the longer text."""
        following, link, length = self.next, self.link, self.length
        known = following[last].get(token)
        if known is not None:  # another text has begun like this one
            state = known if length[known] == length[last] + 1 else self._split(last, token, known)
        else:
            state, at = self._add({}, length[last] + 1, 0, 0), last
            while at >= 0 and token not in following[at]:
                following[at][token] = state
                at = link[at]
            if at >= 0:
                known = following[at][token]
                link[state] = known if length[known] == length[at] + 1 else self._split(at, token, known)
        before, ends = last, state
        for _ in range(HOPS):
            if before >= 0:
                following[before][token] = following[before].pop(token)
                before = link[before]
            if ends > 0:
                self.visits[ends] += 1
                ends = link[ends]
        return state

    def step(self, match: Match, token: int) -> Match:
        """The longest suffix of a match and a token that the texts have."""
        following, link, length = self.next, self.link, self.length
        state, size = self._current(match)
        while state and token not in following[state]:
            state = link[state]
            size = length[state]
        known = following[state].get(token)
        return (0, 0) if known is None else (known, size + 1)

    def followers(self, match: Match, most: int) -> Iterator[tuple[int, int, int, int]]:
        """Tokens that followed a match or a suffix of it: of longer strings first, of each string the latest first.

        Yields (token, length of the string, how often the token followed it, how often it occurred). A token may come
        again with a shorter string.
        """
        state, size = self._current(match)
        while state:
            following = self.next[state]
            for token in islice(reversed(following), most):
                yield token, size, self.visits[following[token]], self.visits[state]
            state = self.link[state]
            size = self.length[state]

    def _current(self, match: Match) -> Match:
        """The same string's state, also where it was split since."""
        state, size = match
        while state and size <= self.length[self.link[state]]:
            state = self.link[state]
        return state, size

    def _add(self, following: dict[int, int], length: int, link: int, visits: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.visits.append(visits)
        return len(self.next) - 1

    def _split(self, at: int, token: int, state: int) -> int:
        """A state of its own for those strings of ``state`` that are no longer than ``at`` and the token."""
        made = self._add(dict(self.next[state]), self.length[at] + 1, self.link[state], self.visits[state])
        self.link[state] = made
        while at >= 0 and self.next[at].get(token) == state:
            self.next[at][token] = made
            at = self.link[at]
        return made
