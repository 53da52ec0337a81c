"""Rules as text, as records and with bad input: parameters, names, logits, uniforms, gates that cannot open."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fsd_infer.errors import FsdError, NonFiniteLogitsError, UnknownNameError
from fsd_infer.rules import (
    DraftOnly,
    Exact,
    Fuzzy,
    FuzzyStrict,
    RandomGate,
    Rule,
    gates,
    parse_rule,
)
from tests.tree_rounds import INF, SPECS, tree_round


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_broken_logits_name_who_broke_them(bad: float, spec: str, greedy: bool) -> None:
    rule = parse_rule(spec)
    round = tree_round(0, greedy=greedy)
    entries: object = slice(None) if bad == -INF else 3
    logits = round.logits.clone()
    logits[2, 4, entries] = bad  # type: ignore[index]
    with pytest.raises(NonFiniteLogitsError, match="the target's logits in row 2"):
        rule(replace(round, logits=logits, scores=logits))
    with pytest.raises(NonFiniteLogitsError, match="the target's processed logits in row 2.*logits processors"):
        rule(replace(round, scores=logits))
    q_logits = round.tree.q_logits.clone()
    q_logits[1, 0, entries] = bad  # type: ignore[index]
    with pytest.raises(NonFiniteLogitsError, match="the drafter's logits in row 1"):
        rule(replace(round, tree=replace(round.tree, q_logits=q_logits)))


def test_missing_uniforms() -> None:
    with pytest.raises(FsdError, match="temperature above 0 needs uniforms"):
        Exact()(tree_round(0, uniforms=None))
    with pytest.raises(FsdError, match="draws at random at every temperature"):
        RandomGate(0.5)(tree_round(0, greedy=True, uniforms=None))


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    gates._warn_never_opens.cache_clear()
    yield
    gates._warn_never_opens.cache_clear()


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize("name", ["reverse_kl", "ag"])
def test_a_gate_that_the_reduced_vocabulary_keeps_shut_says_so_once(name: str) -> None:
    round = tree_round(0, reduced=True)
    with pytest.warns(UserWarning, match=f"'{name}' is infinite.*never opens"):
        assert not Fuzzy(name, 1000.0)(round).gate_open.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fuzzy(name, 1000.0)(round)
        Fuzzy("js", 0.3)(round)
        Fuzzy(name, 0.3)(tree_round(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fuzzy("js", -0.1), "threshold must be at least 0, not -0.1"),
        (lambda: Fuzzy("js", math.nan), "threshold must be at least 0, not nan"),
        (lambda: FuzzyStrict("js", "0.3"), "threshold must be a number"),
        (lambda: Fuzzy("js", 0.3, budget=-1), "budget must be at least 0"),
        (lambda: FuzzyStrict("js", 0.3, budget=math.nan), "budget must be at least 0"),
        (lambda: Fuzzy("js", 0.3, gate_on="both"), "gate_on must be 'raw' or 'processed', not 'both'"),
        (lambda: RandomGate(-0.1), "rate must be between 0 and 1"),
        (lambda: RandomGate(1.1), "rate must be between 0 and 1"),
        (lambda: RandomGate(math.nan), "rate must be between 0 and 1"),
        (lambda: RandomGate(0.1, budget=-2), "budget must be at least 0"),
        (lambda: DraftOnly(budget=-2), "budget must be at least 0"),
        (lambda: parse_rule("fuzzy:js:-1"), "threshold must be at least 0"),
        (lambda: parse_rule("fuzzy:js:1e-400"), "threshold must be a number that fits a float, not '1e-400'"),
        (lambda: Fuzzy("tv", 2), "threshold must be at most 1, the largest tv, not 2"),
        (
            lambda: parse_rule("fuzzy-strict:top_k_js:20:0.7"),
            "at most 0.6931, the largest top_k_js:20, not 0.7",
        ),
        (lambda: parse_rule("tilted:2:gate=30"), "gate must be at most 0.6931, the largest js, not 30"),
        (lambda: parse_rule("fuzzy:js:much"), "threshold must be a number that fits a float, not 'much'"),
        (lambda: parse_rule("fuzzy:js:0.3:size=2"), "cannot use 'size=2'; fuzzy takes divergence, threshold"),
        (lambda: parse_rule("exact:0.3"), "block must be true or false"),
        (lambda: parse_rule("random"), "rate is missing"),
        (lambda: parse_rule("random:0.1:rate=0.2"), "rate is given twice"),
    ],
)
def test_bad_parameters(make: object, message: str) -> None:
    with pytest.raises(FsdError, match=message):
        make()  # type: ignore[operator]


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown rule 'fuzy'.*Did you mean 'fuzzy'"):
        parse_rule("fuzy:js:0.3")
    with pytest.raises(UnknownNameError, match="unknown divergence 'jensen'"):
        parse_rule("fuzzy:jensen:0.3")
    with pytest.raises(UnknownNameError, match="unknown divergence 'jensen'"):
        Fuzzy("jensen", 0.3)


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("exact", Exact()),
        ("fuzzy", Fuzzy()),
        ("fuzzy:js:0.3", Fuzzy("js", 0.3)),
        ("fuzzy:threshold=0.2:divergence=tv", Fuzzy("tv", 0.2)),
        ("fuzzy:js:0.3:budget=2:gate=processed", Fuzzy("js", 0.3, budget=2.0, gate_on="processed")),
        ("fuzzy:js:0.3:budget=none", Fuzzy("js", 0.3)),
        ("fuzzy:top_k_js:0.3", Fuzzy("top_k_js", 0.3)),
        ("fuzzy:top_k_js:20:0.3", Fuzzy("top_k_js:20", 0.3)),
        ("fuzzy:kl:inf", Fuzzy("kl", INF)),
        ("fuzzy-strict:tv:0.2", FuzzyStrict("tv", 0.2)),
        ("random:0.25", RandomGate(0.25)),
        ("draft-only", DraftOnly()),
        ("draft-only:budget=3", DraftOnly(budget=3.0)),
    ],
)
def test_rules_as_text(spec: str, rule: Rule) -> None:
    assert parse_rule(spec) == rule
    assert parse_rule(rule) is rule


def test_records_say_everything() -> None:
    assert Fuzzy("kl", 0.5, budget=2, gate_on="processed").describe() == {
        "rule": "fuzzy",
        "divergence": "kl",
        "direction": "KL(q||p), draft from target",
        "formula": "sum q ln(q/p)",
        "unit": "nats",
        "threshold": 0.5,
        "gate_on": "processed",
        "floor": 0.0,
        "budget": 2.0,
        "novel": 0,
        "budget_unit": "nats",
    }
    assert FuzzyStrict("tv", 0.5).describe()["rule"] == "fuzzy-strict"
    assert RandomGate(0.5).describe() == {
        "rule": "random", "rate": 0.5, "budget": None, "novel": 0, "budget_unit": "nats",
    }  # fmt: skip
    assert DraftOnly().describe()["rule"] == "draft-only"
    assert Exact().describe() == {"rule": "exact", "block": False}
