"""The law of whole sequences under every rule, against exact enumeration; what is spent; budgets; published bounds.

Statistical checks use fixed seeds; each has a false-alarm probability of at most 1e-6 over the choice of its seed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from scipy.stats import chi2, norm

from fsd_infer.rules import Fuzzy, FuzzyStrict, Rule, Verification, parse_rule
from fsd_infer.rules.contexts import Evidence
from fsd_infer.tree import DraftTree
from tests.rules_toy import CHAIN, LENGTH, LONG_CHAIN, Enumeration, Toy, V, plain_rule, simulate

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
    if spec == "exact":
        np.testing.assert_allclose(law, wanted.target_law(), atol=1e-12)
        assert got.gates.sum() == 0
        assert got.spent.sum() == 0
    elif toy in ("tree", "chain"):
        assert 0 < got.gates.sum()


def test_the_law_test_can_fail() -> None:
    """The rules' laws differ by enough to be told apart by the same test with the same number of rows."""
    models = TOYS["tree"]
    exact = simulate(models, parse_rule("exact"), ROWS, seed=11)
    for spec in ("fuzzy:js:0.08", "fuzzy-strict:js:0.08", "random:0.4", "draft-only"):
        assert p_value(exact.codes, Enumeration(models, **RULES[spec]).sequence_law()) < ALARM
    closed = [not Enumeration(TOYS[toy], **RULES["fuzzy:js:0.08"]).wants[0:21].all() for toy in ("tree", "chain")]
    assert all(closed)


@pytest.mark.parametrize("toy", ["tree-processed", "tree-reduced-processed", "chain-processed"])
@pytest.mark.parametrize("spec", ["exact", "fuzzy:js:inf", "fuzzy:kl:0.25:gate=processed", "random:1"])
def test_forbidden_tokens_are_never_emitted(spec: str, toy: str) -> None:
    models = TOYS[toy]
    got = simulate(models, plain_rule(spec), ROWS, seed=12)
    possible = Enumeration(models, "exact").target_law() > 0
    assert possible.sum() < V**LENGTH  # something is forbidden
    assert possible[got.codes].all()


def test_strict_rule_may_emit_forbidden_tokens_but_not_on_a_budget() -> None:
    models = TOYS["tree-processed"]
    possible = Enumeration(models, "exact").target_law() > 0
    free = simulate(models, parse_rule("fuzzy-strict:js:inf"), ROWS, seed=12)
    assert not possible[free.codes].all()
    assert np.isinf(free.spent[~possible[free.codes]]).all()
    bound = simulate(models, parse_rule("fuzzy-strict:js:inf:budget=5"), ROWS, seed=12)
    assert possible[bound.codes].all()


def one_step_law(rule: Rule, p: torch.Tensor, q: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Laws [contexts, V] of the first token after each context, its draft sampled from q, and where a gate is open."""
    rows = p.shape[0]
    tree = DraftTree.chain(tokens=torch.zeros(rows, 2, dtype=torch.long), q_logits=q[:, None], q_scores=q[:, None])
    logits = p[:, None].expand(rows, 2, V)
    at = Evidence(Verification(tree, logits, logits, False, torch.rand(rows, 2, 3)), at_once=True).whole
    law = rule.law(at)
    return law.log_probs(at).double().exp().view(rows, 2, V)[:, 0].numpy(), law.applies.view(rows, 2)[:, 0].numpy()


@pytest.mark.parametrize("make", [Fuzzy, FuzzyStrict])
@pytest.mark.parametrize(
    ("name", "threshold", "bound"),
    [
        ("tv", 0.2, 0.2),
        ("kl", 0.1, math.sqrt(0.1 / 2)),
        ("reverse_kl", 0.1, math.sqrt(0.1 / 2)),
        ("js", 0.03, math.sqrt(2 * 0.03)),
    ],
)
def test_one_step_bounds_with_sampled_drafts(make: type, name: str, threshold: float, bound: float) -> None:
    """The law is q where the gate is open and p elsewhere, so TV(law, p) <= T, sqrt(T/2) or sqrt(2T)."""
    generator = torch.Generator().manual_seed(13)
    p = torch.randn(24, V, generator=generator)
    q = p + torch.randn(24, V, generator=generator) * torch.linspace(0.1, 1.5, 24)[:, None]
    law, gates = one_step_law(make(name, threshold), p, q)
    exact_p, exact_q = (x.double().softmax(-1).numpy() for x in (p, q))
    np.testing.assert_allclose(law, np.where(gates[:, None], exact_q, exact_p), atol=1e-6)
    assert gates.any() and not gates.all()
    assert (np.abs(law - exact_p).sum(-1) / 2 <= bound + 1e-6).all()


def test_or_never_accepts_less_than_strict() -> None:
    generator = torch.Generator().manual_seed(14)
    contexts = torch.zeros(ROWS, dtype=torch.long)
    for seed in range(4):
        models = Toy.make(20 + seed, sampled=True)
        assert models.parents == tuple(CHAIN)
        round = models.round(contexts, generator)
        for threshold in (0.02, 0.1, 0.3):
            either = Fuzzy("js", threshold)(round).accepted.double()
            strict = FuzzyStrict("js", threshold)(round).accepted.double()
            gap = either - strict
            assert gap.mean() >= -norm.isf(ALARM) * gap.std() / math.sqrt(ROWS)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_accepted_length_grows_with_the_threshold(sampled: bool, greedy: bool) -> None:
    """With the same uniforms `fuzzy` does so in every row, hence on average too; strict on average over contexts."""
    generator = torch.Generator().manual_seed(15)
    models = Toy.make(30, sampled=sampled)
    round = models.round(torch.randint(0, 21, (ROWS,), generator=generator), generator, greedy=greedy)
    thresholds = (0.0, 0.01, 0.03, 0.1, 0.2, 0.4, math.inf)
    means = []
    for make in (Fuzzy, FuzzyStrict):
        lengths = [make("js", threshold)(round).accepted for threshold in thresholds]
        if make is Fuzzy:
            for shorter, longer in zip(lengths, lengths[1:]):
                assert (longer >= shorter).all()
        means = [x.double().mean().item() for x in lengths]
        slack = norm.isf(ALARM) * 2 / math.sqrt(ROWS)
        assert all(b >= a - slack for a, b in zip(means, means[1:]))
        assert means[-1] > means[0] + 0.1
