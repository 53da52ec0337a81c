"""Rules as text and with bad input; their verdicts on trees and sampled chains: paths, sources, budgets, draws."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_core import functional
from fsd_core.errors import FsdError, NonFiniteLogitsError
from fsd_core.sampling import draw
from fsd_infer.rules import Exact, Fuzzy, RoundInput, TokenHistory, TokenOrigin, parse_rule
from fsd_infer.rules.fuzzy import _warn_never_opens
from fsd_infer.rules.texts import sentence_ends, sentence_position
from fsd_infer.trees.tree import DraftTree
from tests.covering import covering
from tests.tree_rounds import INF, SPECS, OneByOne, any_round, assert_same, chain_round, tree_round, verdict_of


@pytest.mark.parametrize(
    ("bad", "spec", "greedy"), covering([math.nan, INF, -INF], SPECS, [False, True], pairs=[(1, 2)])
)
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


@pytest.mark.parametrize("name", ["kl_pq", "ag"])
def test_a_gate_that_the_reduced_vocabulary_keeps_shut_says_so_once(name: str) -> None:
    _warn_never_opens.cache_clear()
    round = tree_round(0, reduced=True)
    with pytest.warns(UserWarning, match=f"'{name}' is infinite.*never opens"):
        assert not Fuzzy(name, 1000.0)(round).relaxed.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Fuzzy(name, 1000.0)(round)
        Fuzzy("js", 0.3)(round)
        Fuzzy(name, 0.3)(tree_round(0))


KINDS = [("tree", False), ("tree", True), ("chain", False)]  # and whether it is greedy


def inner_of(round: RoundInput, row: int) -> set[int]:
    return set(round.tree.parents[row, 1:].tolist())


@pytest.mark.parametrize(("shape", "greedy"), KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_verdict_is_a_path_of_the_tree(spec: str, shape: str, greedy: bool) -> None:
    rule = parse_rule(spec)
    for seed in range(4):
        round = any_round(shape, seed, greedy)
        verdict, tree, exact = rule(round), round.tree, OneByOne()(round)
        dense = shape == "tree" and rule.name in ("fuzzy-strict", "draft-only", "cascade-token", "ensemble")
        comparable = greedy or shape == "chain" and rule.name != "fuzzy-strict"  # which draws from p instead
        batch, nodes = tree.tokens.shape
        assert verdict.path.shape == verdict.tokens.shape == (batch, tree.max_depth + 1)
        for row in range(batch):
            accepted = int(verdict.accepted[row])
            path = verdict.path[row].tolist()
            assert path[0] == 0
            assert path[accepted + 1 :] == path[accepted : accepted + 1] * (tree.max_depth - accepted)
            for step in range(accepted):
                assert tree.parents[row, path[step + 1]] == path[step]
                assert verdict.tokens[row, step] == tree.tokens[row, path[step + 1]]
            children = (tree.parents[row] == path[accepted]) & (torch.arange(nodes) > 0)
            assert int(verdict.tokens[row, accepted]) not in tree.tokens[row, children].tolist()
            for padded in (verdict.tokens, verdict.relaxed, verdict.spent):
                assert not padded[row, accepted + 1 :].any()
            assert (verdict.spent[row][~verdict.relaxed[row]] == 0).all()
            for step in range(accepted + 1):
                assert verdict.relaxed[row, step] or verdict.sources[row, step] != TokenOrigin.GATE
                assert not verdict.relaxed[row, step] or path[step] in inner_of(round, row)
                # as far as exact decoding comes, too: it would have taken the same draft, or the gate let it through
                alike = exact.path[row, : step + 1].tolist() == path[: step + 1]
                if comparable and alike and step < accepted:
                    same = int(exact.accepted[row]) > step and exact.path[row, step + 1] == path[step + 1]
                    let_through = verdict.relaxed[row, step] and not same
                    assert verdict.sources[row, step] == (TokenOrigin.GATE if let_through else TokenOrigin.EXACT)
            chosen = TokenOrigin.GATE if dense and verdict.relaxed[row, accepted] else TokenOrigin.TARGET
            assert verdict.sources[row, accepted] == chosen


@pytest.mark.parametrize(("shape", "greedy"), KINDS)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "budget" not in spec])
def test_kernels_and_plain_torch_agree(spec: str, shape: str, greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, rounds = parse_rule(spec), [any_round(shape, seed, greedy) for seed in range(4)]
    found = [verdict_of(rule, round) for round in rounds]
    for name, kernels in functional.KERNELS.items():
        if name != "host_max":  # by which shapes are no larger than they must
            monkeypatch.delitem(kernels, "cpu", raising=False)
    for round, one in zip(rounds, found, strict=True):
        round.tree = replace(round.tree)  # what it has cached is forgotten
        assert_same(one, verdict_of(rule, round))


@pytest.mark.parametrize(("shape", "greedy"), KINDS)
@pytest.mark.parametrize("spec", ["fuzzy:js:inf", "typical:0:0", "tilted:0.1:min_p=0:exact_ngram_size=0"])
def test_an_answers_first_tokens_are_exact(spec: str, shape: str, greedy: bool) -> None:
    """Answers have a token each, the root. So the one drawn at depth d is token 1 + d of the answer, from 0."""
    for seed in range(6):
        round = any_round(shape, seed, greedy)
        depth = round.tree.max_depth
        free, exact = parse_rule(spec)(round), OneByOne()(round)
        assert_same(parse_rule(f"{spec}:exact_start=1")(round), free)
        assert_same(parse_rule(f"{spec}:exact_start={2 + depth}")(round), exact)
        partly = parse_rule(f"{spec}:exact_start=2")(round)
        assert torch.equal(partly.tokens[:, 0], exact.tokens[:, 0]) and not partly.relaxed[:, 0].any()
        assert depth < 2 or (partly.accepted >= exact.accepted).all()
        longer = replace(round, texts=TokenHistory([[1, *row] for row in round.tree.tokens[:, :1].tolist()]))
        assert_same(parse_rule(f"{spec}:exact_start=2")(longer), free)


@pytest.mark.parametrize(("shape", "greedy"), KINDS)
@pytest.mark.parametrize("spec", ["fuzzy:js:inf", "typical:0:0", "tilted:0.1:min_p=0:exact_ngram_size=0"])
def test_a_sentences_first_tokens_are_exact(spec: str, shape: str, greedy: bool) -> None:
    for seed in range(6):
        round = any_round(shape, seed, greedy)
        size, rows, exact = round.scores.shape[-1], len(round.scores), OneByOne()(round)
        free = parse_rule(spec)(round)
        for ends, lead, expected in (([], 3, free), ([], 9, exact), (range(size), 1, exact), (range(size), 0, free)):
            marks = torch.zeros(size + 1, dtype=torch.bool)
            marks[list(ends)] = True
            texts = TokenHistory([[7, 7, 7]] * rows, sentence_ends=marks)  # three tokens before the root's choice
            lossy = parse_rule(f"{spec}:exact_sentence_start={lead}")
            assert_same(lossy(replace(round, texts=texts)), expected)


def test_tokens_of_a_sentence_are_counted_over_text_and_path() -> None:
    """Pieces of byte-level and other vocabularies. Token 1 ends a sentence: here after two tokens, and at node 3."""
    pieces = {"a": 0, ".\u010a": 1, "Ġb": 2, "<0x0A>": 3, "ãĢĤ": 4, "?": 5, "▁c": 6}
    ends = sentence_ends(pieces)
    assert ends.tolist() == [False, True, False, True, True, True, False, False]
    assert sentence_ends({}).tolist() == [True]  # nothing is known: exact everywhere
    parents, tokens = torch.tensor([[0, 0, 0, 1, 3]] * 3), torch.tensor([[2, 0, 2, 1, 6]] * 3)
    tree = DraftTree(tokens, parents, torch.empty(3, 0, 8), torch.full((3, 5), -1), torch.zeros(3, 5))
    texts = TokenHistory([[0, 1, 0, 2], [0, 2], [1]], [[1], [6], [6]], sentence_ends=ends)
    assert sentence_position(texts, tree).tolist() == [[2, 3, 3, 0, 1], [3, 4, 4, 0, 1], [0, 1, 1, 0, 1]]
    with pytest.raises(FsdError, match="no ends of sentences"):
        sentence_position(TokenHistory([[0]] * 3), tree)


def test_a_look_ahead_stops_where_a_sentence_begins() -> None:
    """tilted counts no deviation that its bound forbids below: the second draft ends a sentence, the third errs."""
    logits = torch.full((1, 4, 5), -9.0)
    logits[0, [0, 1, 2, 3], [4, 2, 4, 4]] = 0.0
    logits[0, [0, 2], [1, 3]] = torch.tensor([-2.0, -0.1])  # 1 - 2.3 + 1 + 1 - 0.4 > 0, but not without the last
    tree = DraftTree.chain(torch.tensor([[0, 1, 2, 3]]), torch.empty(1, 0, 5), scores=torch.zeros(1, 4))
    ends = torch.tensor([False, False, True, False, False, False])
    round = RoundInput(tree, logits, logits, True, texts=TokenHistory([[0] * 9], sentence_ends=ends))
    spec = "tilted:1:exact_ngram_size=0:min_p=0:deviation_cost=0.3"
    assert parse_rule(spec)(round).accepted.tolist() == [3]
    assert parse_rule(f"{spec}:exact_sentence_start=1")(round).accepted.tolist() == [0]


AS_EXACT = [
    *("fuzzy:js:0", "fuzzy:kl_qp:0:gate=processed", "random:0", "lenient:1", "threshold", "typical:inf:inf"),
    *("relaxed:0", "cactus:0", "cascade-token:-0.1", "ensemble:1", "tilted:inf", "mars:0"),
    "tilted:inf:min_p=0.1:gate=0.3:budget=1",
]


@pytest.mark.parametrize(("spec", "kinds"), [
    *((spec, KINDS) for spec in AS_EXACT),
    ("fuzzy-strict:tv:0", KINDS[:2]),  # a sampled chain's other tokens come from p itself
    ("exact", KINDS[:2]), ("fly:entropy=inf", KINDS[1:2]),
    *((f"asd:{zero}", KINDS[1:2]) for zero in ("budget=0:gap=inf", "inf:0", "0:9:budget=inf")),
])  # fmt: skip
def test_exact_token_for_token_at_the_end_of_its_range(spec: str, kinds: list[tuple[str, bool]]) -> None:
    for (shape, greedy), seed in product(kinds, range(12)):
        round = any_round(shape, seed, greedy)
        if seed % 3 == 0:  # drafter and target agree to the last bit
            round = agreeing(round)
        assert_same(parse_rule(spec)(round), OneByOne()(round))


def agreeing(round: RoundInput) -> RoundInput:
    tree = round.tree
    row, node = (tree.q_index >= 0).nonzero(as_tuple=True)
    raw, processed = (
        round.logits.new_zeros(*tree.q_logits.shape[:2], x.shape[-1]).index_put(
            (row, tree.q_index[row, node]), x[row, node]
        )
        for x in (round.logits, round.scores)
    )
    q_logits, q_scores = (x if tree.draft_ids is None else x[..., tree.draft_ids] for x in (raw, processed))
    return replace(round, tree=replace(tree, q_logits=q_logits, q_scores=q_scores if tree.sampled else None))


@pytest.mark.parametrize(("shape", "greedy"), KINDS)
@pytest.mark.parametrize(
    "spec", ["fuzzy-strict:tv:inf", "draft-only", "tilted:0.1", "cascade-token:0.9", "lenient:0.3"]
)
def test_a_row_without_a_budget_pays_any_cost_beside_rows_with_one(spec: str, shape: str, greedy: bool) -> None:
    """Also what the target forbids, which costs more than any budget."""
    for seed in (1, 3, 5, 7):  # with masked scores
        round = any_round(shape, seed, greedy)
        left = torch.full((len(round.tree.tokens),), INF).index_fill(0, torch.arange(0, 6, 2), 0.3)
        found, free = (parse_rule(spec)(replace(round, budget_left=each)) for each in (left, None))
        assert (found.spent.double().sum(1) <= left + 1e-6).all()
        for name in ("accepted", "tokens", "spent", "relaxed"):
            assert torch.equal(getattr(found, name)[left.isinf()], getattr(free, name)[left.isinf()]), name


WEIGHTS = st.lists(st.just(0.0) | st.floats(2.0**-100, 1.0, width=32), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(weights=WEIGHTS.filter(any), uniform=st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53))
def test_draws_never_leave_the_support(weights: list[float], uniform: float) -> None:
    for dtype in (torch.float64, torch.float32):  # a kernel may take the narrower one
        index = int(draw(torch.tensor([weights]), torch.tensor([uniform], dtype=dtype)))
        shares = torch.tensor([0.0, *weights]).double().cumsum(0) / sum(weights)
        assert weights[index] > 0 and shares[index] - 1e-6 <= uniform <= shares[index + 1] + 1e-6


def test_sampled_drafts_have_to_be_a_chain() -> None:
    round = chain_round(0, length=2)
    parents = torch.zeros_like(round.tree.parents)
    with pytest.raises(FsdError, match="must form a chain"):
        Exact()(replace(round, tree=replace(round.tree, parents=parents)))
