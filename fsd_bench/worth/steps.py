"""Rounds as steps, and the rate at which a chain of rounds emits tokens.

A round emits a token at each node of the path that it takes. How well the next round goes depends on how this one
ended: after a draft that the target found nearly as good as its own the text goes on differently than after one that
was plainly wrong, or after a chain that was accepted to its end. So rounds are sorted by the state in which they begin,
which is how the one before ended, and the states' shares follow from the rule's own transitions between them: a lossy
rule never ends a round at a small regret, where exact decoding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BOUNDS = (0.5, 1.0, 2.0)  # nats
# How a round ends, and so how the next begins: the answer's first round or its end; the token after the path was the
# drafter's own choice there, but a shorter tree had ended before; the drafter's choice was another, whose regret lies
# in one of the bins between the bounds; the deepest node of the evidence was reached.
BEGINNING, HIT, BIN, UNKNOWN = 0, 1, 2, 3 + len(BOUNDS)
STATES = UNKNOWN + 1
FEWEST = 8  # rounds that a state needs to be looked at by itself


def bin_of(regret: float) -> int:
    """The state after a first choice of this regret that was not emitted."""
    return BIN + sum(regret >= bound for bound in BOUNDS)


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted token.

    Attributes:
        nats: spent on it.
        lossy: only another law than the target's let it through.
        ends: the state in which the round ends with it; None: it was a draft, and the round goes on.
    """

    nats: float
    lossy: bool
    ends: int | None = None


@dataclass
class Counts:
    """Steps of rounds that began in one state, by depth. A round whose evidence ends before it does is counted as far
    as it was seen.
    """

    seen: list[int] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)  # [depth][state]
    nats: list[float] = field(default_factory=list)
    lossy: list[int] = field(default_factory=list)

    def add(self, steps: Sequence[Step]) -> None:
        for depth, step in enumerate(steps):
            if depth == len(self.seen):
                self.seen.append(0)
                self.ends.append([0] * STATES)
                self.nats.append(0.0)
                self.lossy.append(0)
            self.seen[depth] += 1
            self.nats[depth] += step.nats
            self.lossy[depth] += step.lossy
            if step.ends is not None:
                self.ends[depth][step.ends] += 1

    @property
    def rounds(self) -> int:
        return self.seen[0] if self.seen else 0


@dataclass(frozen=True)
class Rates:
    """Means per round: tokens, nats, tokens that were let through by another law."""

    tokens: float
    nats: float
    lossy: float


class Rounds:
    """The rounds of one rule with one shape, by the state in which they began."""

    def __init__(self) -> None:
        self._by_state = [Counts() for _ in range(STATES)]
        self._all = Counts()

    def add(self, state: int, steps: Sequence[Step], real: bool = True) -> None:
        """``real``: a round that begins where one of the decoded ones did; others inform their state alone."""
        self._by_state[state].add(steps)
        if real:
            self._all.add(steps)

    def mean(self) -> Rates:
        """Over the rounds that began where decoded ones did, each as likely as another."""
        return _expected(self._all, self._all)[0]

    def stationary(self) -> Rates:
        """Over rounds that follow each other as this rule's do."""
        found = [
            _expected(counts if counts.rounds >= FEWEST or state == BEGINNING else self._all, self._all)
            for state, counts in enumerate(self._by_state)
        ]
        moves = np.array([next_state for _, next_state in found])
        shares = stationary_shares(moves)
        return Rates(*(float(shares @ [getattr(r, name) for r, _ in found]) for name in ("tokens", "nats", "lossy")))


def _expected(counts: Counts, others: Counts) -> tuple[Rates, np.ndarray]:
    """Means per round, and the chances [STATES] of how it ends. Depths that were not seen are taken from ``others``."""
    tokens = nats = lossy = 0.0
    ends, reached, depth = np.zeros(STATES), 1.0, 0
    while reached > 0:
        source = next((c for c in (counts, others) if depth < len(c.seen)), None)
        if source is None:
            ends[UNKNOWN] += reached  # nobody saw what comes there
            break
        seen = source.seen[depth]
        chances = np.array(source.ends[depth]) / seen
        tokens += reached
        nats += reached * source.nats[depth] / seen
        lossy += reached * source.lossy[depth] / seen
        ends += reached * chances
        reached *= max(0.0, (seen - sum(source.ends[depth])) / seen)
        depth += 1
    return Rates(tokens, nats, lossy), ends


def stationary_shares(moves: np.ndarray) -> np.ndarray:
    """Shares [S] of the states that a chain with these chances [S, S] of moving from row to column comes to spend,
    begun in the first state.
    """
    size = len(moves)
    reached = {0}
    while more := {int(to) for at in reached for to in np.flatnonzero(moves[at])} - reached:
        reached |= more
    kept = sorted(reached)
    within = moves[np.ix_(kept, kept)]
    equations = np.vstack([within.T - np.eye(len(kept)), np.ones(len(kept))])
    solved = np.linalg.lstsq(equations, np.append(np.zeros(len(kept)), 1.0), rcond=None)[0]
    shares = np.zeros(size)
    shares[kept] = solved.clip(0.0)
    return shares / shares.sum()
