"""The law of whole sequences under every rule, against exact enumeration; what is spent; budgets.

Statistical checks use fixed seeds; each has a false-alarm probability of at most 1e-6 over the choice of its seed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import rel_entr
from scipy.stats import chi2, norm

from fsd_infer.rules import parse_rule
from tests.rules_toy import LONG_CHAIN, Enumeration, Toy, plain_rule, simulate

ALARM = 1e-6
ROWS = 2_000

RULES = {
    "exact": {"kind": "exact"},
    "fuzzy:js:0.08": {"kind": "fuzzy", "threshold": 0.08},
    "fuzzy:tv:0.25": {"kind": "fuzzy", "divergence": "tv", "threshold": 0.25},
    "fuzzy:kl:0.25:gate=processed": {"kind": "fuzzy", "divergence": "kl", "threshold": 0.25, "gate_on": "processed"},
    "fuzzy:js:inf": {"kind": "fuzzy", "threshold": math.inf},
    "fuzzy:js:0.3:budget=0.5": {"kind": "fuzzy", "threshold": 0.3, "budget": 0.5},
    "fuzzy-strict:js:0.08": {"kind": "fuzzy-strict", "threshold": 0.08},
    "fuzzy-strict:js:0.08:gate=processed": {"kind": "fuzzy-strict", "threshold": 0.08, "gate_on": "processed"},
    "fuzzy-strict:js:0.3:budget=0.3": {"kind": "fuzzy-strict", "threshold": 0.3, "budget": 0.3},
    "random:0.4": {"kind": "random", "rate": 0.4},
    "random:0.6:budget=0.4": {"kind": "random", "rate": 0.6, "budget": 0.4},
    "draft-only": {"kind": "draft-only"},
    "draft-only:budget=0.3": {"kind": "draft-only", "budget": 0.3},
    "tilted:1": {"kind": "tilted", "threshold": math.inf},
    "tilted:0.2:budget=0.5": {"kind": "tilted", "threshold": math.inf, "price": 0.2, "budget": 0.5},
    "tilted:0.5:floor=0.4": {"kind": "tilted", "threshold": math.inf, "price": 0.5, "floor": 0.4},
    "tilted:0.5:gate=0.08": {"kind": "tilted", "threshold": 0.08, "price": 0.5},
    "tilted:0.5:novel=2": {"kind": "tilted", "threshold": math.inf, "price": 0.5, "novel": 2},
    "tilted:0.3:novel=1": {"kind": "tilted", "threshold": math.inf, "price": 0.3, "novel": 1},
    "fuzzy:js:inf:novel=1": {"kind": "fuzzy", "threshold": math.inf, "novel": 1},
    "draft-only:novel=1": {"kind": "draft-only", "novel": 1},
    "exact:block=true": {"kind": "exact"},
}

TOYS = {
    "tree": Toy.make(1),
    "tree-cold": Toy.make(1, temperature=0.7),
    "tree-processed": Toy.make(2, processed=True),
    "tree-reduced": Toy.make(3, reduced=True),
    "tree-reduced-processed": Toy.make(4, reduced=True, processed=True),
    "chain": Toy.make(5, sampled=True),
    "chain-cold": Toy.make(5, sampled=True, temperature=0.7),
    "chain-processed": Toy.make(6, sampled=True, processed=True),
    "chain-reduced": Toy.make(7, sampled=True, reduced=True),
    "long-chain": replace(Toy.make(8, sampled=True), parents=tuple(LONG_CHAIN)),
    "long-chain-processed": replace(Toy.make(9, sampled=True, processed=True), parents=tuple(LONG_CHAIN)),
}
# Does the text so far tell where in its round a context is? A tree's shape follows from the text, but whether a sampled
# draft was accepted does not, and at a chain's leaf no gate can open. Only then is the divergence spent strictly more
# than that of the output: it is the divergence of text and hidden positions together.
ROUNDS_FOLLOW_FROM_TEXT = [toy for toy in TOYS if not toy.startswith("chain")]
# Each rule on each toy, but colder ones, reduced vocabularies and the options of `tilted` only where they may matter.
CASES = [
    (spec, toy)
    for spec in RULES
    for toy in TOYS
    if ("cold" not in toy or spec in ("exact", "fuzzy:js:0.08", "tilted:1"))
    and ("reduced" not in toy or spec.startswith("fuzzy") or spec in ("draft-only", "tilted:1"))
    and ("block" not in spec or "chain" in toy)
    and (spec.count(":") < 2 or not spec.startswith("tilted") or toy in ("tree", "tree-processed", "long-chain"))
]


def p_value(codes: np.ndarray, law: np.ndarray) -> float:
    """Chi-square test of sequence codes against their law; 0 if something impossible was seen."""
    seen = np.bincount(codes, minlength=len(law)).astype(float)
    if seen[law <= 0].any():
        return 0.0
    expected = law * len(codes)
    rare = expected < 10
    observed = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if expected[-1] < 10 and len(expected) > 1:  # the pooled cell itself is rare: into its neighbour
        observed[-2] += observed[-1]
        expected[-2] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


@pytest.mark.parametrize(("spec", "toy"), CASES)
def test_sequence_law_and_spent_divergence(spec: str, toy: str) -> None:
    rule, models = plain_rule(spec), TOYS[toy]
    wanted = Enumeration(models, **RULES[spec])
    law = wanted.sequence_law()
    assert law.sum() == pytest.approx(1.0, abs=1e-9)
    got = simulate(models, rule, ROWS, seed=11)
    assert p_value(got.codes, law) > ALARM
    # chain rule: the expected sum of costs is the divergence of the whole output from the target
    kl = rel_entr(law, wanted.target_law()).sum()
    if math.isinf(kl):
        assert math.isinf(got.spent.mean())
        assert wanted.kind in ("fuzzy-strict", "draft-only")
        assert rule.budget is None
    elif wanted.kind != "random" and toy in ROUNDS_FOLLOW_FROM_TEXT:
        assert wanted.expected_spent == pytest.approx(kl, abs=1e-9)
    else:  # the random gate's coin is hidden, too
        assert kl <= wanted.expected_spent + 1e-9
    if math.isfinite(wanted.expected_spent):
        error = got.spent.std() / math.sqrt(ROWS)
        assert abs(got.spent.mean() - wanted.expected_spent) <= norm.isf(ALARM / 2) * error + 1e-6
    if rule.budget is not None:
        assert got.spent.max() <= rule.budget + 1e-6
        assert wanted.largest_spent <= rule.budget
        assert kl <= rule.budget + 1e-9
    if spec.startswith("exact"):
        np.testing.assert_allclose(law, wanted.target_law(), atol=1e-12)
        assert got.gates.sum() == 0
        assert got.spent.sum() == 0
    elif toy in ("tree", "chain"):
        assert 0 < got.gates.sum()


def test_strict_rule_may_emit_forbidden_tokens_but_not_on_a_budget() -> None:
    models = TOYS["tree-processed"]
    possible = Enumeration(models, "exact").target_law() > 0
    free = simulate(models, parse_rule("fuzzy-strict:js:inf"), ROWS, seed=12)
    assert not possible[free.codes].all()
    assert np.isinf(free.spent[~possible[free.codes]]).all()
    bound = simulate(models, parse_rule("fuzzy-strict:js:inf:budget=5"), ROWS, seed=12)
    assert possible[bound.codes].all()
