"""An exact enumeration of what a rule emits on toy models.

It is written from the rules' definitions in float64 probabilities and shares no code with the package.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import rel_entr, softmax
from scipy.stats import norm

from fsd_infer.trees.tree import DraftTree
from tests.rules_toy import ALARM, LENGTH, ROWS, Toy, V, p_value, plain_rule, simulate, target_distribution

# What it is told of the rules.
RULES = {
    "exact": {"kind": "exact"}, "fuzzy:js:0.08": {"kind": "fuzzy", "threshold": 0.08},
    "fuzzy:tv:0.25": {"kind": "fuzzy", "divergence": "tv", "threshold": 0.25},
    "fuzzy:kl_qp:0.25:gate=processed": dict(kind="fuzzy", divergence="kl_qp", threshold=0.25, gate_on="processed"),
    "fuzzy:js:inf": {"kind": "fuzzy", "threshold": math.inf},
    "fuzzy:js:0.3:budget=0.5": {"kind": "fuzzy", "threshold": 0.3, "budget": 0.5},
    "fuzzy-strict:js:0.08": {"kind": "fuzzy-strict", "threshold": 0.08},
    "fuzzy-strict:js:0.08:gate=processed": {"kind": "fuzzy-strict", "threshold": 0.08, "gate_on": "processed"},
    "fuzzy-strict:js:0.3:budget=0.3": {"kind": "fuzzy-strict", "threshold": 0.3, "budget": 0.3},
    "random:0.4": {"kind": "random", "rate": 0.4},
    "random:0.6:budget=0.4": {"kind": "random", "rate": 0.6, "budget": 0.4}, "draft-only": {"kind": "draft-only"},
    "draft-only:budget=0.3": {"kind": "draft-only", "budget": 0.3},
    "tilted:1": {"kind": "tilted", "threshold": math.inf},
    "tilted:0.2:budget=0.5": {"kind": "tilted", "threshold": math.inf, "kl_coef": 0.2, "budget": 0.5},
    "tilted:0.5:min_p=0.4": {"kind": "tilted", "threshold": math.inf, "kl_coef": 0.5, "min_p": 0.4},
    "tilted:0.5:gate=0.08": {"kind": "tilted", "threshold": 0.08, "kl_coef": 0.5},
    "tilted:0.5:exact_ngram_size=2": {"kind": "tilted", "threshold": math.inf, "kl_coef": 0.5, "exact_ngram_size": 2},
    "tilted:0.3:exact_ngram_size=1": {"kind": "tilted", "threshold": math.inf, "kl_coef": 0.3, "exact_ngram_size": 1},
    "fuzzy:js:inf:exact_ngram_size=1": {"kind": "fuzzy", "threshold": math.inf, "exact_ngram_size": 1},
    "draft-only:exact_ngram_size=1": {"kind": "draft-only", "exact_ngram_size": 1},
    "fuzzy:js:inf:only_in=1..2": {"kind": "fuzzy", "threshold": math.inf, "phases": True},
    "fuzzy-strict:js:0.3:budget=0.3:only_in=1..2": dict(kind="fuzzy-strict", threshold=0.3, budget=0.3, phases=True),
    "draft-only:only_in=1..2": {"kind": "draft-only", "phases": True},
    "tilted:0.5:exact_ngram_size=1:only_in=1..2":
        dict(kind="tilted", threshold=math.inf, kl_coef=0.5, exact_ngram_size=1, phases=True),
}  # fmt: skip


REFERENCE_DIVERGENCES = {
    "kl_qp": lambda p, q: rel_entr(q, p).sum(-1),
    "js": lambda p, q: (rel_entr(p, (p + q) / 2).sum(-1) + rel_entr(q, (p + q) / 2).sum(-1)) / 2,
    "tv": lambda p, q: np.abs(p - q).sum(-1) / 2,
}

Kernel = list[tuple[float, int, bool, float]]  # probability, token, does it go down, nats spent
Place = tuple[int, int]  # context of a round's root, and a node of its tree


@dataclass
class Enumeration:
    """The exact distribution of the first LENGTH emitted tokens.

    Attributes:
        toy: the models.
        kind: exact, fuzzy, fuzzy-strict, random, draft-only or tilted.
        phases: exact but where the last of the tokens 1 and 2 is a 1.
        divergence, threshold, gate_on, rate, budget, kl_coef, min_p, exact_ngram_size: the rule's parameters.
    """

    toy: Toy
    kind: str
    divergence: str = "js"
    threshold: float = 0.0
    gate_on: str = "raw"
    rate: float = 0.0
    budget: float = math.inf
    kl_coef: float = 1.0
    min_p: float = 0.0
    exact_ngram_size: int = 0
    phases: bool = False

    def __post_init__(self) -> None:
        toy = self.toy
        raw_p, raw_q = toy.p.double(), toy.full_q().double()
        self.p = softmax(toy.scores(raw_p).numpy(), axis=-1)
        self.q = softmax(toy.scores(raw_q).numpy(), axis=-1)
        gate_p, gate_q = softmax(raw_p.numpy(), axis=-1), softmax(raw_q.numpy(), axis=-1)
        if self.gate_on == "processed":
            gate_p, gate_q = self.p, self.q
        self.wants = REFERENCE_DIVERGENCES[self.divergence](gate_p, gate_q) <= self.threshold
        self.distribution: dict[tuple[int, ...], float] = defaultdict(float)
        self.expected_spent = 0.0
        self.largest_spent = 0.0
        self.tree_at, self.below = cache(self._tree_at), cache(self._below)
        self._expand((), 0, (0, 0), 1.0, 0.0)

    def sequence_distribution(self) -> np.ndarray:
        """[V ** LENGTH] by code."""
        return np.array([self.distribution[self._tokens(code)] for code in range(V**LENGTH)])

    @staticmethod
    def _tokens(code: int) -> tuple[int, ...]:
        return tuple(code // V**k % V for k in reversed(range(LENGTH)))

    def _tree_at(self, root: int) -> DraftTree:
        return self.toy.draft(torch.tensor([root]), torch.Generator())[0]

    def _below(self, place: Place) -> dict[int, Place]:
        """The children by token; of a sampled chain, whose token is not known, by any."""
        tree = self.tree_at(place[0])
        tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        drafts = tree.is_draft[0].nonzero()[:, 0].tolist()
        below = {tokens[child]: (place[0], child) for child in drafts if parents[child] == place[1]}
        return {token: child for token in range(V) for child in below.values()} if self.toy.sampled else below

    def _expand(self, tokens: tuple[int, ...], context: int, place: Place, weight: float, spent: float) -> None:
        if len(tokens) == LENGTH:
            self.distribution[tokens] += weight
            self.expected_spent += weight * spent
            self.largest_spent = max(self.largest_spent, spent)
            return
        below = self.below(place)
        left = self.budget - spent if math.isfinite(self.budget) else math.inf
        for chance, token, down, cost in self.kernel(tokens, context, place, left):
            if chance > 0.0:
                further = V * context + 1 + token
                after = below.get(token)
                self._expand((*tokens, token), further, after if down else (further, 0), weight * chance, spent + cost)

    def kernel(self, text: tuple[int, ...], context: int, place: Place, left: float) -> Kernel:
        p, q = self.p[context], self.q[context]
        if not self.below(place):
            return [(p[y], y, False, 0.0) for y in range(V)]
        opens = {
            "exact": [(1.0, False)],
            "random": [(self.rate, True), (1 - self.rate, False)],
            "draft-only": [(1.0, True)],
        }.get(self.kind, [(1.0, bool(self.wants[context]))])
        if self.kind != "tilted" and self.tree_at(place[0]).q_index[0, place[1]] < 0:  # no q, so no gate opens
            opens = [(1.0, False)]
        if self.phases and [token for token in text if token in (1, 2)][-1:] != [1]:
            opens = [(1.0, False)]
        found: Kernel = []
        for weight, gate in opens:
            distribution = self._distribution(text, context, place) if gate else p
            cost = rel_entr(distribution, p).sum()
            if cost > left:
                distribution, cost = p, 0.0
            found += [
                (weight * chance, y, down, cost) for chance, y, down in self._draws(p, q, distribution, gate, place)
            ]
        return found

    def _draws(self, p: np.ndarray, q: np.ndarray, distribution: np.ndarray, gate: bool, place: Place) -> Iterator:
        """(probability, token, does it go down) of a context that emits by a distribution."""
        if not self.toy.sampled:
            yield from ((distribution[y], y, y in self.below(place)) for y in range(V))
        elif self.kind == "fuzzy-strict" and distribution is p:  # a closed gate draws from p, whatever was drafted
            yield from ((q[x] * p[y], y, y == x) for x in range(V) for y in range(V))
        else:  # the exact test of the draft against the distribution
            yield from ((min(distribution[x], q[x]), x, True) for x in range(V))
            yield from ((max(distribution[y] - q[y], 0.0), y, False) for y in range(V))

    def _repeats(self, text: tuple[int, ...], token: int) -> bool:
        """Would the token complete an n-gram of the text."""
        n, after = self.exact_ngram_size, (*text, token)
        return n > 0 and after[-n:] in [after[i : i + n] for i in range(len(after) - n)]

    def _held(
        self, text: tuple[int, ...], p: np.ndarray, distribution: np.ndarray, drafted: Sequence[int]
    ) -> np.ndarray:
        """The distribution with p for the drafts that complete a known n-gram, and the rest scaled to what they
        leave.
        """
        known = np.array([token in drafted and self._repeats(text, token) for token in range(V)])
        rest = distribution[~known].sum()
        return np.where(known, p, distribution * (1 - p[known].sum()) / rest) if rest > 0 else p

    def _clamped(self, text: tuple[int, ...], p: np.ndarray, distribution: np.ndarray) -> np.ndarray:
        """A distribution from q: no token that completes a known n-gram gets more than p, what is cut off is drawn from
        p.
        """
        known = np.array([self._repeats(text, token) for token in range(V)])
        kept = np.where(known, np.minimum(distribution, p), distribution)
        return kept + (distribution - kept).sum() * p

    def _favoured(self, text: tuple[int, ...], context: int, place: Place) -> dict[int, Place]:
        """The drafted tokens that a tilted distribution may favour."""
        p, drafted = self.p[context], self.below(place)
        likely = {token: child for token, child in drafted.items() if p[token] > 0 and p[token] >= self.min_p * p.max()}
        return {token: child for token, child in likely.items() if not self._repeats(text, token)}

    def _worth(self, text: tuple[int, ...], context: int, token: int, child: Place) -> float:
        """v of a drafted token."""
        return 1 + self.value((*text, token), V * context + 1 + token, child)

    def value(self, text: tuple[int, ...], context: int, place: Place) -> float:
        """V, by the recursion that defines it."""
        p, favoured = self.p[context], self._favoured(text, context, place)
        terms = [1 - sum(p[token] for token in favoured)]
        terms += [
            p[token] * math.exp(self._worth(text, context, token, child) / self.kl_coef)
            for token, child in favoured.items()
        ]
        return self.kl_coef * math.log(sum(terms))

    def _distribution(self, text: tuple[int, ...], context: int, place: Place) -> np.ndarray:
        """The distribution of an open gate; p where it has none."""
        p, q = self.p[context], self.q[context]
        drafted = list(self.below(place))
        if self.toy.sampled:
            distribution = q
            if self.kind == "tilted":
                distribution = self._clipped(text, p, q)
            elif self.kind in ("fuzzy", "random"):  # a draft that the target forbids is tested exactly
                left = np.clip(p - q, 0, None)
                distribution = np.where(p > 0, q, 0.0) + q[p <= 0].sum() * left / left.sum()
            return self._clamped(text, p, distribution)
        if self.kind == "tilted":
            distribution = p.copy()
            for token, child in self._favoured(text, context, place).items():
                distribution[token] *= math.exp(self._worth(text, context, token, child) / self.kl_coef)
            return self._held(text, p, distribution / distribution.sum(), drafted)
        if self.kind not in ("fuzzy", "random"):
            return self._clamped(text, p, q)
        inside = np.zeros(V)
        inside[drafted] = p[drafted]
        if not any(p[token] > 0 and not self._repeats(text, token) for token in drafted):
            return p
        return self._held(text, p, inside / inside.sum(), drafted)

    def _clipped(self, text: tuple[int, ...], p: np.ndarray, q: np.ndarray) -> np.ndarray:
        """The tilted distribution of a sampled chain."""
        wins = np.array([not self._repeats(text, token) and p[token] >= self.min_p * p.max() for token in range(V)])
        limit = np.exp(wins / self.kl_coef)

        def distribution(z: float) -> np.ndarray:
            return np.clip(q, p / z, p * limit / z)

        return distribution(brentq(lambda z: distribution(z).sum() - 1, 0.5, 2 * limit.max(), xtol=1e-14))


def check_distribution(spec: str, toy: Toy, rows: int = ROWS, seed: int = 11, follows: bool = True) -> None:
    """What a rule emits on a toy, and what it says it spends, against the enumeration.

    Args:
        follows: the text tells where in its round a context is. Whether a sampled draft was accepted, it does not, and
            at a chain's leaf no gate can open. Then the divergence spent, that of text and hidden positions together,
            is strictly more than that of the output.
    """
    rule, wanted = plain_rule(spec), Enumeration(toy, **RULES[spec])
    distribution = wanted.sequence_distribution()
    assert abs(distribution.sum() - 1.0) < 1e-9
    got = simulate(toy, rule, rows, seed)
    assert p_value(got.codes, distribution) > ALARM
    # chain rule: the expected sum of costs is the divergence of the whole output from the target
    kl = rel_entr(distribution, target_distribution(toy)).sum()
    if math.isinf(kl):
        assert math.isinf(wanted.expected_spent) and math.isinf(got.spent.mean())
        assert wanted.kind in ("fuzzy-strict", "draft-only") and rule.budget is None
    elif wanted.kind != "random" and follows:
        assert abs(wanted.expected_spent - kl) < 1e-9
    else:  # the random gate's coin is hidden, too
        assert kl <= wanted.expected_spent + 1e-9
    if math.isfinite(wanted.expected_spent):
        error = got.spent.std() / math.sqrt(rows)
        assert abs(got.spent.mean() - wanted.expected_spent) <= norm.isf(ALARM / 2) * error + 1e-6
    if rule.budget is not None:
        assert got.spent.max() <= rule.budget + 1e-6
        assert wanted.largest_spent <= rule.budget
        assert kl <= rule.budget + 1e-9
    assert (got.gates.sum() == 0) == spec.startswith("exact"), "every other rule opens gates"
    if spec.startswith("exact"):
        np.testing.assert_allclose(distribution, target_distribution(toy), atol=1e-12)
        assert got.spent.sum() == 0
