"""Distributions of rules: of whole sequences against enumeration, and at every node against formulas of the papers, in
numpy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax

from fsd_infer import FsdError
from fsd_infer.rules import (
    Asd,
    Exact,
    Fly,
    RoundInput,
    RuleInputs,
    parse_rule,
)
from tests.covering import covering, fast_only
from tests.output_probs import output_probs
from tests.rules_enumeration import RULES, check_distribution
from tests.rules_toy import TOYS, Toy, V
from tests.tree_rounds import tree_round

# Each rule on each toy, but reduced vocabularies and options only where they may matter.
CASES = [
    (spec, toy)
    for spec in RULES
    for toy in TOYS
    if ("reduced" not in toy or spec.startswith("fuzzy") or spec in ("draft-only", "tilted:1"))
    and (
        not any(option in spec for option in ("exact_ngram_size", "only_in")) or toy in ("tree", "chain", "long-chain")
    )
    and (spec.count(":") < 2 or not spec.startswith("tilted") or toy in ("tree", "tree-processed", "long-chain"))
]


def on_a_tree_and_a_chain() -> list[tuple[str, str]]:
    """Of each rule's cases, one of either kind, the toys of a kind taking turns."""
    found = []
    for number, spec in enumerate(RULES):
        toys = [toy for rule, toy in CASES if rule == spec]
        for of_kind in ([toy for toy in toys if ("chain" in toy) is is_chain] for is_chain in (False, True)):
            found += [(spec, of_kind[number % len(of_kind)])] if of_kind else []
    return found


@pytest.mark.parametrize(("spec", "toy"), fast_only(CASES, on_a_tree_and_a_chain()))
def test_sequence_distribution_and_spent_divergence(spec: str, toy: str) -> None:
    check_distribution(spec, TOYS[toy], follows=not toy.startswith("chain"))


# References take p, q and the children, or None where a draft was sampled from q, and return the distribution.


def _residual(p: np.ndarray, q: np.ndarray, kept: np.ndarray) -> np.ndarray:
    left = np.clip(p - q, 0, None)
    return kept + (1 - kept.sum()) * left / left.sum()


def _children_at(p: np.ndarray, children: list[int], chance: float) -> np.ndarray:
    distribution = p * (1 - chance) / max(1 - p[children].sum(), 1e-300)
    distribution[children] = p[children] * chance / p[children].sum()
    return distribution


def lenient(p, q, children, lenience):  # type: ignore[no-untyped-def]
    if children is None:
        return _residual(p, q, np.minimum(q, p / lenience))
    return _children_at(p, children, min(1.0, p[children].sum() / lenience))


def threshold(p, q, children, single, acc):  # type: ignore[no-untyped-def]
    if children is None:
        return _residual(p, q, np.where((p >= single) & (p > 0), q, np.minimum(q, p / acc)))
    passing = [child for child in children if p[child] >= single]
    return _children_at(p, passing, 1.0) if passing else lenient(p, q, children, acc)


def passing(p, q, children, passes):  # type: ignore[no-untyped-def]
    if children is None:
        return _residual(p, q, np.where(passes(p) & (p > 0), q, np.minimum(p, q)))
    chosen = [child for child in children if passes(p)[child] and p[child] > 0]
    return _children_at(p, chosen, 1.0) if chosen else p


def plausible(p: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    return p >= min(epsilon, delta * math.exp(rel_entr(p, 1).sum()))


def near_the_best(p: np.ndarray, k: int, cutoff: Callable[[float], float]) -> np.ndarray:
    return (p >= np.sort(p)[-k] - 1e-9) & (p >= cutoff(p.max()) - 1e-9)


def runner_up(p: np.ndarray, margin: float) -> np.ndarray:
    second, first = np.sort(p)[-2:]
    return (p >= second - 1e-9) & (math.log(first / second) < margin)


def cactus(p, q, children, delta):  # type: ignore[no-untyped-def]
    if children is not None:
        mass = p[children].sum()
        return _children_at(p, children, min(1.0, mass + math.sqrt(2 * delta * mass * max(0, 1 - mass))))
    distribution = np.zeros(len(p))
    for x in range(len(p)):  # over all drafts
        h = p * 0.0
        h[x] = min(1.0, p[x] + math.sqrt(2 * delta * p[x] * (1 - p[x])))
        others = np.arange(len(p)) != x
        h[others] = p[others] * (1 - h[x]) / (1 - p[x])
        accepted = min(1.0, h[x] / q[x]) if q[x] > 0 else 0.0
        distribution[x] += q[x] * accepted
        if accepted < 1 and q[x] > 0:
            left = np.clip(h - q, 0, None)
            distribution += q[x] * (1 - accepted) * left / left.sum()
    return distribution


def cascade(p, q, children, alpha):  # type: ignore[no-untyped-def]
    trusted = p >= (1 - alpha) * p.max()
    return np.where(trusted, q, 0) + (1 - q[trusted].sum()) * p


def ensemble(p, q, children, weight):  # type: ignore[no-untyped-def]
    return weight * p + (1 - weight) * q


REFERENCES: dict[str, partial[np.ndarray]] = {
    "lenient:0.5": partial(lenient, lenience=0.5), "lenient:0.9": partial(lenient, lenience=0.9),
    "threshold:0.4:0.8": partial(threshold, single=0.4, acc=0.8),
    "threshold:acc=0.6": partial(threshold, single=1.1, acc=0.6),
    "typical": partial(passing, passes=partial(plausible, epsilon=0.09, delta=0.3)),
    "typical:0.4:0.9": partial(passing, passes=partial(plausible, epsilon=0.4, delta=0.9)),
    "relaxed:2:0.2": partial(passing, passes=partial(near_the_best, k=2, cutoff=lambda best: best - 0.2)),
    "relaxed:3:0.5:true": partial(passing, passes=partial(near_the_best, k=3, cutoff=lambda best: best / 2)),
    "mars": partial(passing, passes=partial(runner_up, margin=1.0)),
    "mars:0.3": partial(passing, passes=partial(runner_up, margin=0.3)),
    "cactus:0.02": partial(cactus, delta=0.02), "cactus:0.5": partial(cactus, delta=0.5),
    "cascade-token:0.3": partial(cascade, alpha=0.3), "cascade-token:1": partial(cascade, alpha=1.0),
    "ensemble:0.7": partial(ensemble, weight=0.7), "fuzzy:js:inf": partial(passing, passes=lambda p: p >= 0),
    "fuzzy-strict:js:inf": partial(ensemble, weight=0.0),
    "fuzzy:js:inf:min_p=0.3": partial(passing, passes=lambda p: p >= 0.3 * p.max()),
    "fuzzy-strict:js:inf:min_p=0.3": partial(cascade, alpha=0.7),
}  # fmt: skip


def inner_contexts(toy: Toy, greedy: bool = False):  # type: ignore[no-untyped-def]
    """A round with roots at 64 contexts, and (index, p, q, children) of each of its inner nodes."""
    generator = torch.Generator().manual_seed(3)
    roots = torch.randint(0, 85, (64,), generator=generator)
    tree, where = toy.draft(roots, generator)
    round = toy.round(roots, torch.Generator().manual_seed(3), greedy=greedy)
    if not toy.sampled:
        assert torch.equal(tree.tokens, round.tree.tokens)
    p = softmax((toy.p if greedy else toy.scores(toy.p)).double().numpy(), axis=-1)
    q = softmax((toy.full_q() if greedy else toy.scores(toy.full_q())).double().numpy(), axis=-1)
    found = []
    for row, root in enumerate(roots.tolist()):
        contexts = [root]
        for node in range(1, len(toy.parents)):
            contexts.append(V * contexts[toy.parents[node]] + 1 + int(round.tree.tokens[row, node]))
        for node, context in enumerate(contexts):
            children = [int(round.tree.tokens[row, c]) for c in range(1, len(contexts)) if toy.parents[c] == node]
            if children:
                found.append((row * len(contexts) + node, p[context], q[context], children))
    return round, found


@pytest.mark.parametrize(
    ("spec", "shape", "kind"),
    covering(list(REFERENCES), ["tree", "chain"], ["", "-processed", "-reduced"], pairs=[(0, 1), (1, 2)]),
)
def test_the_distribution_at_a_node_is_the_papers_formula(spec: str, shape: str, kind: str) -> None:
    toy = shape + kind
    round, inner = inner_contexts(TOYS[toy])
    inputs = RuleInputs(round)
    distributions = output_probs(parse_rule(spec).output(inputs), inputs).flatten(0, 1).numpy()
    changed = 0
    for index, p, q, children in inner:
        wanted = REFERENCES[spec](p, q, None if TOYS[toy].sampled else children)
        assert wanted.sum() == pytest.approx(1.0, abs=1e-9)
        np.testing.assert_allclose(distributions[index], wanted, atol=2e-6)
        changed += not np.allclose(wanted, p, atol=1e-3)
    assert changed


@pytest.mark.parametrize("spec", REFERENCES)
def test_temperature_zero_emits_the_likeliest_token_of_the_distribution(spec: str) -> None:
    for toy in (TOYS["tree"], TOYS["tree-reduced"]):
        round, inner = inner_contexts(toy, greedy=True)
        verdict = parse_rule(spec)(round)
        changed = 0
        for index, p, q, children in inner:
            row, node = divmod(index, len(toy.parents))
            if REFERENCES[spec].func is cascade:  # one-hot p and q
                trusted = p[q.argmax()] >= (1 - REFERENCES[spec].keywords["alpha"]) * p.max()
                choice = (q if trusted else p).argmax()
            else:
                choice = REFERENCES[spec](p, q, children).argmax()
            if node == 0:
                assert verdict.tokens[row, 0] == choice
                changed += choice != p.argmax()
        assert changed or spec == "lenient:0.9" or spec == "cactus:0.02"


# fly --------------------------------------------------------------------------------------------------------------


def fly_reference(round: RoundInput, row: int, window: int, entropy: float) -> list[int]:
    """The tokens that FLy emits, by recursion."""
    tokens, parents = round.tree.tokens[row].tolist(), round.tree.parents[row].tolist()
    p = softmax(round.scores[row].double().numpy(), axis=-1)
    below = {node: [c for c in range(1, len(parents)) if parents[c] == node] for node in range(len(parents))}

    def agreeing(node: int) -> int:
        return max((1 + agreeing(c) for c in below[node] if tokens[c] == p[node].argmax()), default=0)

    node, emitted = 0, []
    while True:
        choice = int(p[node].argmax())
        best = np.sort(p[node])[-3:]
        if choice not in [tokens[c] for c in below[node]] and -(best * np.log(best)).sum() >= entropy:
            deferred = [c for c in below[node] if agreeing(c) >= window - 1]
            if deferred:
                choice = tokens[max(deferred, key=lambda c: p[node][tokens[c]])]
        emitted.append(choice)
        down = [c for c in below[node] if tokens[c] == choice]
        if not down:
            return emitted
        node = down[0]


def test_fly_lets_a_mismatch_through_where_the_target_agrees_with_what_follows() -> None:
    let_through = 0
    for seed, window in itertools.product(range(30), (1, 2, 3)):
        round = tree_round(seed, nodes=12, greedy=True)
        verdict = Fly(window, 0.8)(round)
        exact = Exact()(round)
        for row in range(round.tree.tokens.shape[0]):
            wanted = fly_reference(round, row, window, 0.8)
            assert verdict.tokens[row, : int(verdict.accepted[row]) + 1].tolist() == wanted
            let_through += window > 1 and int(verdict.accepted[row]) > int(exact.accepted[row])
    assert let_through > 5
    with pytest.raises(FsdError, match="rule 'fly'.*needs temperature 0"):
        Fly()(tree_round(0))


# asd --------------------------------------------------------------------------------------------------------------


def asd_reference(round: RoundInput, row: int, gap: float, most: int, left: float) -> list[int]:
    """The tokens that ASD emits, context by context down the tree."""
    tokens, parents = round.tree.tokens[row].tolist(), round.tree.parents[row].tolist()
    z = round.scores[row].double().numpy()
    below = {node: [c for c in range(1, len(parents)) if parents[c] == node] for node in range(len(parents))}

    def depth(node: int) -> int:
        return max((1 + depth(c) for c in below[node]), default=0)

    node, emitted = 0, list[int]()
    while True:
        choice = int(z[node].argmax())
        loss = {c: z[node].max() - z[node][tokens[c]] for c in below[node]}
        if choice not in [tokens[c] for c in below[node]] and most:
            fit = [c for c in below[node] if loss[c] <= gap * depth(node)]
            best = min(fit, key=lambda c: loss[c], default=None)
            if best is not None and loss[best] <= left:
                choice, left, most = tokens[best], left - loss[best], most - 1
        emitted.append(choice)
        down = [c for c in below[node] if tokens[c] == choice]
        if not down:
            return emitted
        node = down[0]


@pytest.mark.parametrize(("gap", "most", "budget"), [(0.25, 2, 8.0), (1.0, 1, 9.0), (2.0, 3, 1.5), (math.inf, 9, 2.5)])
def test_asd_passes_cheap_mismatches_within_three_bounds(gap: float, most: int, budget: float) -> None:
    passed = 0
    for seed in range(25):
        round = tree_round(seed, nodes=12, greedy=True)
        verdict, exact = Asd(gap, most, budget=budget)(round), Exact()(round)
        for row in range(round.tree.tokens.shape[0]):
            wanted = asd_reference(round, row, gap, most, budget)
            assert verdict.tokens[row, : int(verdict.accepted[row]) + 1].tolist() == wanted
            passed += int(verdict.accepted[row]) > int(exact.accepted[row])
        assert (verdict.spent.sum(1) <= budget + 1e-6).all()
    assert passed > 5
    with pytest.raises(FsdError, match="rule 'asd'.*needs temperature 0"):
        Asd()(tree_round(0))
