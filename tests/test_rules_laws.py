"""The law of whole sequences under every rule, against exact enumeration; what is spent; budgets.

Statistical checks use fixed seeds; each has a false-alarm probability of at most 1e-6 over the choice of its seed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import rel_entr
from scipy.stats import norm

from fsd_infer.rules import parse_rule
from tests.rules_enumeration import RULES, Enumeration
from tests.rules_toy import ALARM, ROWS, TOYS, p_value, plain_rule, simulate

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
