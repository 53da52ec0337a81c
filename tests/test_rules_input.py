"""Rules as text and with bad input: parameters, names, logits, uniforms, gates that cannot open."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fsd_infer.errors import FsdError, NonFiniteLogitsError
from fsd_infer.rules import DraftOnly, Exact, Fuzzy, FuzzyStrict, RandomGate, Rule, fuzzy, parse_rule
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
    q_logits, scores = round.tree.q_logits.clone(), round.tree.scores.clone()
    q_logits[1, 0, entries] = bad  # type: ignore[index]
    scores[1, 3] = math.nan  # what a drafter makes of such logits
    with pytest.raises(NonFiniteLogitsError, match="the drafter's logits in row 1"):
        rule(replace(round, tree=replace(round.tree, q_logits=q_logits, scores=scores)))


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    fuzzy._warn_never_opens.cache_clear()
    yield
    fuzzy._warn_never_opens.cache_clear()


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize("name", ["kl_pq", "ag"])
def test_a_gate_that_the_reduced_vocabulary_keeps_shut_says_so_once(name: str) -> None:
    round = tree_round(0, reduced=True)
    with pytest.warns(UserWarning, match=f"'{name}' is infinite.*never opens"):
        assert not Fuzzy(name, 1000.0)(round).gate_open.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fuzzy(name, 1000.0)(round)
        Fuzzy("js", 0.3)(round)
        Fuzzy(name, 0.3)(tree_round(0))


BAD: dict[str, str] = {
    "fuzzy:js:-0.1": "threshold must be at least 0, not -0.1",
    "fuzzy:js:nan": "threshold must be a number that fits a float, not 'nan'",
    "fuzzy:js:1e-400": "threshold must be a number that fits a float, not '1e-400'",
    "fuzzy:js:much": "threshold must be a number that fits a float, not 'much'",
    "fuzzy:js:0.3:budget=-1": "budget must be at least 0",
    "fuzzy:js:0.3:gate=both": "gate_on must be 'raw' or 'processed', not 'both'",
    "fuzzy:js:0.3:size=2": "cannot use 'size=2'; fuzzy takes divergence, threshold",
    "fuzzy:tv:2": "threshold must be at most 1, the largest tv, not 2",
    "fuzzy-strict:top_k_js:20:0.7": "at most 0.6931, the largest top_k_js:20, not 0.7",
    "fuzzy:jensen:0.3": "unknown divergence 'jensen'", "fuzy:js:0.3": "unknown rule 'fuzy'.*Did you mean 'fuzzy'",
    "random": "rate is missing", "random:1.1": "rate must be between 0 and 1",
    "random:0.1:rate=0.2": "rate is given twice", "exact:0.3": "block must be true or false",
    "tilted:0": "price must be at least 0.001, not 0", "tilted:1:floor=inf": "floor must be between 0 and 1, not inf",
    "tilted:1:no_repeat=4": "no_repeat is now novel, and counts the prompt too",
    "tilted:1:novel=2.5": "novel must be a whole number, not '2.5'",
    "tilted:1:novel=-1": "novel must be between 0 and 64, not -1",
    "tilted:2:gate=30": "gate must be at most 0.6931, the largest js, not 30",
    "lenient:0": "lenience must be above 0 and at most 1, not 0.0",
    "threshold:2": "single must be between 0 and 1, not 2", "threshold:acc=0": "acc must be",
    "typical:-1": "epsilon must be at least 0", "relaxed:3:2": "delta must be between 0 and 1",
    "cactus:inf": "delta must be between 0 and 1e.06, not inf", "cascade-token:1.1": "alpha must be at most 1",
    "ensemble:0": "weight must be", "fly:0": "window must be between 1 and 1024",
    "fly:6:-1": "entropy must be at least 0",
}  # fmt: skip


@pytest.mark.parametrize("spec", BAD)
def test_bad_parameters_are_named(spec: str) -> None:
    with pytest.raises(FsdError, match=BAD[spec]):
        parse_rule(spec)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fuzzy("js", math.nan), "threshold must be at least 0, not nan"),
        (lambda: FuzzyStrict("js", "0.3"), "threshold must be a number"),  # type: ignore[arg-type]
        (lambda: Exact()(tree_round(0, uniforms=None)), "above temperature 0 needs uniforms"),
        (lambda: RandomGate(0.5)(tree_round(0, greedy=True, uniforms=None)), "draws at random at every temperature"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(FsdError, match=message):
        make()


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("fuzzy", Fuzzy()), ("fuzzy:threshold=0.2:divergence=tv", Fuzzy("tv", 0.2)),
        ("fuzzy:js:0.3:budget=2:gate=processed", Fuzzy("js", 0.3, budget=2.0, gate_on="processed")),
        ("fuzzy:js:0.3:budget=none", Fuzzy("js", 0.3)), ("fuzzy:top_k_js:20:0.3", Fuzzy("top_k_js:20", 0.3)),
        ("fuzzy:kl_qp:inf", Fuzzy("kl_qp", INF)), ("random:0.25", RandomGate(0.25)),
        ("draft-only:budget=3", DraftOnly(budget=3.0)),
    ],
)  # fmt: skip
def test_rules_as_text(spec: str, rule: Rule) -> None:
    assert parse_rule(spec) == rule
    assert parse_rule(rule) is rule
