"""Rules on deterministic trees: paths, sources, greedy decoding, thresholds at their ends, budgets, draws."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsd_infer.cpu import ops
from fsd_infer.rules import (
    Contexts,
    DraftOnly,
    Exact,
    Fuzzy,
    FuzzyStrict,
    Law,
    RandomGate,
    Rule,
    Source,
    Texts,
    Verification,
    parse_rule,
)
from fsd_infer.rules._draws import draw
from fsd_infer.tree import DraftTree, ancestors_of
from tests.rules_toy import Toy
from tests.tree_rounds import INF, SPECS, assert_same, emitted, inner_of, one_row, tree_round, verdict_of


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_verdict_is_a_path_of_the_tree(spec: str, reduced: bool, greedy: bool) -> None:
    rule = parse_rule(spec)
    for seed in range(5):
        round = tree_round(seed, greedy=greedy, reduced=reduced, mask=seed % 2 == 1)
        verdict, tree = rule(round), round.tree
        assert verdict.path.shape == verdict.tokens.shape == (6, tree.max_depth + 1)
        for row in range(6):
            accepted = int(verdict.accepted[row])
            path = verdict.path[row].tolist()
            assert path[0] == 0
            assert path[accepted + 1 :] == path[accepted : accepted + 1] * (tree.max_depth - accepted)
            for step in range(accepted):
                assert tree.parents[row, path[step + 1]] == path[step]
                assert verdict.tokens[row, step] == tree.tokens[row, path[step + 1]]
            last = int(verdict.tokens[row, accepted])
            children = (tree.parents[row] == path[accepted]) & (torch.arange(9) > 0)
            assert last not in tree.tokens[row, children].tolist()
            assert verdict.tokens[row, accepted + 1 :].sum() == 0
            assert not verdict.gate_open[row, accepted + 1 :].any()
            assert verdict.spent[row, accepted + 1 :].sum() == 0
            assert (verdict.spent[row][~verdict.gate_open[row]] == 0).all()
            for step in range(accepted + 1):
                if verdict.sources[row, step] == Source.GATE:
                    assert verdict.gate_open[row, step]
                if verdict.gate_open[row, step]:
                    assert path[step] in inner_of(round, row)
            if rule.name not in ("fuzzy-strict", "draft-only", "cascade-token", "ensemble"):
                assert verdict.sources[row, accepted] == Source.TARGET


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_do_not_see_each_other(spec: str, greedy: bool) -> None:
    rule = parse_rule(spec)
    for seed in range(4):
        round = tree_round(seed, greedy=greedy, reduced=seed % 2 == 0, mask=seed > 1)
        if rule.budget is not None:
            round = replace(round, budget_left=torch.linspace(0, rule.budget, 6))
        together = rule(round)
        for row in range(6):
            alone = rule(one_row(round, row))
            width = alone.tokens.shape[1]  # a row alone may have a shallower tree
            for field in ("tokens", "sources", "gate_open", "path"):
                assert torch.equal(getattr(alone, field)[0], getattr(together, field)[row, :width]), field
            torch.testing.assert_close(alone.spent[0], together.spent[row, :width])
            assert alone.accepted[0] == together.accepted[row]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if "budget" not in spec])
def test_level_by_level_and_all_at_once_agree(spec: str, greedy: bool) -> None:
    rule = parse_rule(spec)
    for seed in range(8):
        round = tree_round(seed, greedy=greedy, reduced=seed % 2 == 0, mask=seed > 3)
        assert_same(verdict_of(rule, round, True), verdict_of(rule, round, False))


class _Widened(TorchDispatchMode):
    """Counts the copies in fp32 of narrower numbers, by how many numbers they are."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32 and getattr(args[0], "dtype", None) == torch.bfloat16:
            self.copies[out.numel()] += 1
        return out


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("spec", ["exact", "fuzzy:js:0.3", "fuzzy:top_k_js:0.3", "fuzzy-strict:tv:0.3", "draft-only"])
def test_all_at_once_no_logits_are_widened_twice(
    spec: str, reduced: bool, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "kernels", lambda: None)  # without our CPU kernels, as on a GPU
    batch, nodes, vocabulary, drafted = 2, 3, 640, 160
    ids = torch.arange(drafted) if reduced else None
    logits = torch.randn(batch, nodes, vocabulary).bfloat16()
    q_logits = torch.randn(batch, nodes - 1, drafted if reduced else vocabulary).bfloat16()
    tree = DraftTree.chain(torch.arange(nodes).expand(batch, -1), q_logits, ids)
    round = Verification(tree, logits, logits, greedy, torch.rand(batch, nodes, 3))
    with _Widened() as widened:
        verdict_of(parse_rule(spec), round, step_by_step=False)
    # the target's, unless its maxima are enough, and the drafter's where that of as many tokens is asked for
    targets = not (greedy and spec == "exact")
    drafters = spec.startswith(("fuzzy-strict", "draft-only")) or (spec != "exact" and not reduced)
    assert widened.copies[batch * nodes * vocabulary] == targets + drafters


@pytest.mark.parametrize("step_by_step", [True, False])
def test_logits_of_a_narrower_type_count_as_what_they_are(step_by_step: bool) -> None:
    for seed in range(8):  # bf16 rounds to many ties, which the smallest token wins
        round = tree_round(seed, greedy=True)
        narrow = round.logits.bfloat16()
        wide = narrow.float()
        for spec in ("exact", "fuzzy:js:0.3", "draft-only"):
            rule = parse_rule(spec)
            found = verdict_of(rule, replace(round, logits=narrow, scores=narrow), step_by_step)
            assert_same(found, verdict_of(rule, replace(round, logits=wide, scores=wide), step_by_step))


@dataclass(frozen=True)
class _Asked(Rule):
    """Another rule, and what it is asked."""

    rule: Rule
    contexts: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list, hash=False)

    def law(self, at: Contexts) -> Law:
        self.contexts.append(list(zip(at.rows.tolist(), at.nodes.tolist(), strict=True)))
        return self.rule.law(at)


@pytest.mark.parametrize("spec", ["exact", "fuzzy:js:inf", "draft-only"])
def test_a_greedy_walk_that_goes_as_expected_asks_once(spec: str) -> None:
    round = tree_round(0, greedy=True)
    tree = round.tree
    logits = torch.zeros_like(round.logits)
    rows = torch.arange(tree.tokens.shape[0])
    logits[rows[:, None], tree.parents[:, 1:], tree.tokens[:, 1:]] = 1.0 + tree.tokens[:, 1:]
    for row in rows.tolist():  # the drafter's favourites are the target's
        for node in inner_of(round, row):
            tree.q_logits[row, tree.q_index[row, node]] = logits[row, node]
    rule = _Asked(parse_rule(spec))
    verdict = verdict_of(rule, replace(round, logits=logits, scores=logits), step_by_step=True)
    inner = {row: inner_of(round, row) for row in rows.tolist()}
    visited = [(row, node) for row in inner for node in set(verdict.path[row].tolist()) & inner[row]]
    assert len(rule.contexts) == 1 and sorted(rule.contexts[0]) == sorted(visited)
    assert int(verdict.accepted.min()) > 0


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("spec", ["fuzzy:js:0", "fuzzy:kl:0:gate=processed", "fuzzy-strict:tv:0", "random:0"])
def test_threshold_zero_gives_the_tokens_of_the_exact_rule(spec: str, greedy: bool) -> None:
    for seed in range(20):
        round = tree_round(seed, greedy=greedy, mask=seed % 2 == 1)
        if seed % 3 == 0:  # drafter and target agree to the last bit
            inner = round.tree.q_index >= 0
            row, node = inner.nonzero(as_tuple=True)
            round.tree.q_logits[row, round.tree.q_index[row, node]] = round.logits[row, node]
        assert_same(parse_rule(spec)(round), Exact()(round))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("rule", [Fuzzy("js", INF), Fuzzy("reverse_kl", INF), RandomGate(1.0)])
def test_threshold_infinity_accepts_to_a_leaf(rule: Rule, greedy: bool) -> None:
    for seed in range(10):
        round = tree_round(seed, greedy=greedy, reduced=seed % 2 == 0)
        verdict = rule(round)
        for row in range(6):
            assert int(verdict.path[row, -1]) not in inner_of(round, row)
            assert verdict.accepted[row] == round.tree.depths[row, verdict.path[row, -1]]


def test_greedy_emits_argmaxes() -> None:
    for seed in range(10):
        round = tree_round(seed, greedy=True, reduced=seed % 2 == 0, mask=seed % 3 == 0, uniforms=None)
        exact, fuzzy, strict = Exact()(round), Fuzzy("js", INF)(round), FuzzyStrict("js", INF)(round)
        tree = round.tree
        for row in range(6):
            for step in range(int(exact.accepted[row]) + 1):
                node = int(exact.path[row, step])
                assert exact.tokens[row, step] == round.scores[row, node].argmax()
            for step in range(int(fuzzy.accepted[row]) + 1):
                node = int(fuzzy.path[row, step])
                scores = round.scores[row, node]
                best = int(scores.argmax())
                children = tree.tokens[row, 1:][tree.parents[row, 1:] == node]
                reachable = children[scores[children] > -INF]
                if best in children.tolist() or len(reachable) == 0:
                    assert fuzzy.tokens[row, step] == best
                    assert fuzzy.sources[row, step] in (Source.EXACT, Source.TARGET)
                    assert fuzzy.spent[row, step] == 0
                else:
                    assert fuzzy.tokens[row, step] == reachable[scores[reachable].argmax()]
                    assert fuzzy.sources[row, step] == Source.GATE
                    regret = scores[best] - scores[reachable].max()
                    torch.testing.assert_close(fuzzy.spent[row, step], regret)
            for step in range(int(strict.accepted[row]) + 1):
                node = int(strict.path[row, step])
                if node in inner_of(round, row):
                    favourite = tree.q_logits[row, tree.q_index[row, node]].argmax()
                    token = favourite if tree.draft_ids is None else tree.draft_ids[favourite]
                    assert strict.tokens[row, step] == token


def hand_made(greedy: bool = False) -> Verification:
    """Root with children 1 and 2; p = (.4, .3, .2, .1), q close to it; first draw outside the children."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    q = torch.tensor([0.1, 0.42, 0.38, 0.1]).log()
    parents = torch.tensor([[0, 0, 0]])
    tree = DraftTree(
        tokens=torch.tensor([[3, 1, 2]]),
        parents=parents,
        depths=torch.tensor([[0, 1, 1]]),
        ancestors=ancestors_of(parents),
        q_logits=q[None, None],
        q_index=torch.tensor([[0, -1, -1]]),
    )
    logits = p.expand(1, 3, 4)
    uniforms = torch.tensor([[[0.2, 0.7, 0.5], [0.95, 0.0, 0.5], [0.75, 0.0, 0.5]]])
    return Verification(tree, logits, logits, greedy, uniforms)


def test_a_round_by_hand() -> None:
    exact = Exact()(hand_made())  # u = .2 draws token 0, no child
    assert emitted(exact, 0) == [0]
    assert exact.sources[0, 0] == Source.TARGET
    fuzzy = Fuzzy("tv", 0.5)(hand_made())  # redraw in {1: .6, 2: .4} at .7 gives 2; then the leaf draws at .75
    assert emitted(fuzzy, 0) == [2, 2]
    assert fuzzy.path.tolist() == [[0, 2]]
    assert fuzzy.sources.tolist() == [[Source.GATE, Source.TARGET]]
    assert fuzzy.gate_open.tolist() == [[True, False]]
    assert fuzzy.spent[0].tolist() == pytest.approx([-math.log(0.5), 0.0], abs=1e-6)
    strict = FuzzyStrict("tv", 0.5)(hand_made())  # u = .2 draws token 1 from q
    assert emitted(strict, 0)[0] == 1
    kl = 0.1 * math.log(0.1 / 0.4) + 0.42 * math.log(0.42 / 0.3) + 0.38 * math.log(0.38 / 0.2)
    assert strict.spent[0, 0].item() == pytest.approx(kl, abs=1e-6)
    assert emitted(Fuzzy("tv", 0.29)(hand_made()), 0) == [0]  # tv = .3: closed
    outside = hand_made()
    outside.uniforms[0, 0, 0] = 0.05  # type: ignore[index]
    drafted = DraftOnly()(outside)  # q draws token 0, which nobody drafted
    assert emitted(drafted, 0) == [0]
    assert drafted.sources[0, 0] == Source.GATE
    greedy = Fuzzy("tv", 0.5)(hand_made(greedy=True))
    assert emitted(greedy, 0) == [1, 0]
    assert greedy.spent[0, 0].item() == pytest.approx(math.log(0.4 / 0.3), abs=1e-6)


def test_the_greedy_regret_is_the_limit_of_temperature_times_kl() -> None:
    round = hand_made()
    regret = Fuzzy("tv", 0.5)(hand_made(greedy=True)).spent[0, 0].item()
    errors = []
    for temperature in (1.0, 0.5, 0.2, 0.02):
        cold = replace(round, scores=round.logits / temperature)
        errors.append(abs(temperature * Fuzzy("tv", 0.5)(cold).spent[0, 0].item() - regret))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-6


def test_a_closed_gate_where_every_child_is_forbidden() -> None:
    for greedy in (False, True):
        round = hand_made(greedy)
        scores = round.scores.clone()
        scores[..., [1, 2]] = -INF
        verdict = Fuzzy("tv", INF)(replace(round, scores=scores))
        assert emitted(verdict, 0) == [0]
        assert not verdict.gate_open.any()
        assert verdict.spent.sum() == 0


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("spec", ["fuzzy:js:inf", "fuzzy-strict:tv:inf", "random:0.8", "draft-only"])
def test_budget_is_never_exceeded_and_spent_in_order(spec: str, greedy: bool) -> None:
    rule = parse_rule(spec)
    budgets = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, INF])
    used = 0
    for seed in range(15):
        round = tree_round(seed, greedy=greedy, mask=seed % 2 == 1, budget_left=budgets)
        verdict = rule(round)
        assert (verdict.spent.double().sum(-1) <= budgets + 1e-6).all()
        used += int((verdict.spent.sum(-1)[1:5] > 0).sum())
        free = rule(replace(round, budget_left=None))
        assert_same(rule(replace(round, budget_left=torch.full((6,), INF))), free)
        poor = rule(replace(round, budget_left=torch.zeros(6)))
        assert poor.spent.sum() == 0
        # a gate closes only for lack of money: as long as the unlimited rule could pay, both do the same
        for row in range(6):
            affordable = free.spent[row].double().cumsum(-1) <= budgets[row] - 1e-6
            steps = int(affordable.long().cumprod(0).sum())
            steps = min(steps, int(free.accepted[row]) + 1)
            assert verdict.tokens[row, :steps].tolist() == free.tokens[row, :steps].tolist()
    assert used > 3


def test_the_rules_own_budget_holds_where_the_round_brings_none() -> None:
    for seed in range(10):
        verdict = Fuzzy("js", INF, budget=0.3)(tree_round(seed))
        assert (verdict.spent.sum(-1) <= 0.3 + 1e-6).all()
        whole = Fuzzy("js", INF, budget=0.3)(tree_round(seed, budget_left=torch.full((6,), INF)))
        assert_same(whole, Fuzzy("js", INF)(tree_round(seed)))


def test_gate_compares_raw_or_processed_distributions() -> None:
    round = hand_made()
    # the processors make target and drafter agree: tv is .3 raw and 0 processed
    agreed = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    round = replace(round, process_draft=lambda tree: agreed.expand(1, 1, 4))
    assert not Fuzzy("tv", 0.1)(round).gate_open.any()
    assert Fuzzy("tv", 0.1, gate_on="processed")(round).gate_open[0, 0]
    assert not Fuzzy("tv", 0.1, gate_on="processed")(replace(round, greedy=True)).gate_open.any()


def test_plain_decoding_is_a_tree_without_drafts() -> None:
    logits = torch.randn(3, 1, 7)
    tree = DraftTree.root_only(torch.tensor([1, 2, 3]), vocab_size=7)
    for spec in SPECS:
        round = Verification(tree, logits, logits, True, torch.rand(3, 1, 3), texts=Texts([[1], [2], [3]]))
        for step_by_step in (True, False):
            verdict = verdict_of(parse_rule(spec), round, step_by_step)
            assert verdict.tokens.tolist() == logits.argmax(-1).tolist()
            assert verdict.accepted.tolist() == [0, 0, 0]
            assert not verdict.gate_open.any()


def weights_and_uniforms() -> st.SearchStrategy[tuple[list[float], float]]:
    weights = st.lists(st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32)), min_size=1, max_size=30)
    return st.tuples(
        weights.filter(lambda w: max(w) > 0), st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53))
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=weights_and_uniforms())
def test_draws_never_leave_the_support(case: tuple[list[float], float]) -> None:
    weights = torch.tensor([case[0]])
    index = draw(weights, torch.tensor([case[1]], dtype=torch.float64))
    assert weights[0, index[0]] > 0


def test_draws_over_a_large_vocabulary() -> None:
    weights = torch.zeros(1, 200_000)
    weights[0, 1000:199_000] = 1e-6
    ends = torch.tensor([0.0, 0.5, 1 - 2**-24])
    found = draw(weights.expand(3, -1), ends).tolist()
    assert found[0] == 1000
    assert abs(found[1] - 100_000) <= 1
    assert 198_990 <= found[2] < 199_000


def test_q_is_only_processed_for_rules_that_use_it() -> None:
    calls: list[Tensor] = []
    models = Toy.make(1, processed=True)
    round = models.round(torch.zeros(50, dtype=torch.long), torch.Generator().manual_seed(0))

    def counted(tree: DraftTree) -> Tensor:
        calls.append(tree.tokens)
        return models.process_draft(tree)

    round = replace(round, process_draft=counted)
    for spec in ("exact", "fuzzy:js:0.3", "random:0.5"):
        parse_rule(spec)(round)
    assert calls == []
    for spec in ("fuzzy:js:0.3:gate=processed", "draft-only"):
        parse_rule(spec)(round)
    assert len(calls) == 2  # once per round
