"""The law of whole sequences under every rule, against exact enumeration; what is spent; budgets.

Statistical checks use fixed seeds; each has a false-alarm probability of at most 1e-6 over the choice of its seed.
"""

from __future__ import annotations

import pytest

from tests.rules_enumeration import RULES, check_law
from tests.rules_toy import TOYS, plain_rule, simulate

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
    check_law(spec, TOYS[toy], follows=not toy.startswith("chain"))


@pytest.mark.parametrize("toy", ["tree", "chain"])
@pytest.mark.parametrize("spec", [spec for spec in RULES if not spec.startswith("exact")])
def test_every_rule_opens_gates(spec: str, toy: str) -> None:
    assert simulate(TOYS[toy], plain_rule(spec), 50, seed=11).gates.sum() > 0
