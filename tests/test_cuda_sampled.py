"""Triton kernels of rounds above temperature 0, interpreted: the same uniform numbers give the tokens of torch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fsd_core import functional, sampling
from fsd_core.divergence import divergence, divergence_rows
from fsd_infer.backends.cuda import functions
from fsd_infer.backends.cuda.compare import KINDS, RESIDUAL
from fsd_infer.rules import RoundInput, RuleInputs, TokenHistory, parse_rule
from fsd_infer.rules.texts import completes_ngram, repeating_tokens
from fsd_infer.rules.walk import exact_walk
from tests.tree_rounds import assert_same, drawn_tree, verdict_of

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"  # see tests/conftest.py
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
OF_RULES = (
    "accept_prob_under", "accepted_path", "biased_sampled", "completes_ngram", "divergence_rows",
    "draft_numbers", "draw_rest", "emitted", "not_above_p",
    "reduced_drafts", "reduced_rows", "repeating_tokens", "residual_mass", "tilted_bias",
)  # fmt: skip
UNIFORMS = (0.0, 0.321, 1.0 - 2**-24)


def in_torch(function: object) -> object:
    return function.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "above"), [(1, 9), (2, 0), (5, 9)])
def test_which_children_are_fixed_and_which_contexts_draw(width: int, above: int, dtype: torch.dtype) -> None:
    drawn = 0
    for _ in range(3):
        scores = torch.stack([torch.randperm(40) for _ in range(8)]).view(2, 4, 40).div(3).to(DEVICE, dtype)
        accept = torch.randn(2, 4, device=DEVICE).sub(2).clamp_max(0.0)
        ancestors, reserved = (torch.rand(*shape, above, device=DEVICE) < 0.4 for shape in ((2, 4), (2,)))
        free = torch.randint(0, 12, (2,), device=DEVICE)
        given = scores, width, accept, ancestors, reserved, free, (1.1, 0.9), -4.0
        found = functions.mixed_children(*given)
        for one, other in zip(found, sampling.mixed_children.__wrapped__(*given), strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(one, other)
        drawn += int(found.drawn.sum())
    assert 0 < drawn < 24


@pytest.mark.parametrize("columns", [5, 1300, 9000])
def test_a_row_is_sampled_by_inverse_cdf(columns: int) -> None:
    """Rows with zeros, with one token, with an empty chunk, and rows that do not count."""
    x = torch.randn(3, 2, columns, device=DEVICE).mul(3)
    x[0, :, ::3] = x[1, 0, 1:] = x[1, 1, 1:4097] = -torch.inf
    where = torch.tensor([[True, False], [True, True], [False, True]], device=DEVICE)
    for uniform in UNIFORMS:
        uniforms = torch.full((3, 2), uniform, device=DEVICE)
        found = functions.sample_rows(x, uniforms, where)
        assert torch.equal(found[where], in_torch(sampling.sample_rows)(x, uniforms, where)[where])  # type: ignore[operator]
        assert bool((x.gather(-1, found[..., None]) > -torch.inf)[..., 0][where].all()) and int(found.max()) < columns


@pytest.mark.parametrize("kind", ["tree", "chain", "likely tokens"])
@pytest.mark.parametrize("drafted", [12, None])
def test_a_sampled_round_walks_as_in_torch(drafted: int | None, kind: str) -> None:
    """Logits of two types, processed ones with a top-k mask, and faults, which verdicts carry."""
    tree, p = drawn_tree(kind, drafted, torch.float32, 4), torch.randn(4, 8, 23).mul(2)
    for processed in (False, True):
        logits, uniforms = p.to(torch.bfloat16, copy=True), torch.rand(4, 9, 3)[:, :8]
        scores = logits.float().masked_fill(p < 0, -torch.inf).div(0.7) if processed else logits
        round = RoundInput(tree, logits, scores, False, uniforms)
        for broken in (False, True)[: 1 + processed]:
            if broken:
                logits[3, 3, 7], tree.q_logits[2], tree.q_index[2, 1] = torch.nan, torch.inf, 1
            inputs = (on_device(round) for _ in range(2))
            found = functions.exact_walk(scores.to(DEVICE), next(inputs))
            expected = in_torch(exact_walk)(scores.to(DEVICE), next(inputs))  # type: ignore[operator]
            assert found.keys() | {"allowed"} == expected.keys() and found["faults"].keys() == expected["faults"].keys()
            for name, fault in expected["faults"].items():
                assert torch.equal(found["faults"][name].any(1), fault.any(1)), name
            for name in () if broken else found.keys() - {"proposers", "faults"}:
                torch.testing.assert_close(found[name], expected[name], equal_nan=True, msg=name)


def on_device(round: RoundInput) -> RuleInputs:
    moved = {name: x.to(DEVICE) for name, x in vars(round.tree).items() if isinstance(x, Tensor)}
    tree = replace(round.tree, **moved)
    logits = round.logits.to(DEVICE)
    scores = logits if round.scores is round.logits else round.scores.to(DEVICE)
    assert round.uniforms is not None
    return RuleInputs(replace(round, tree=tree, logits=logits, scores=scores, uniforms=round.uniforms.to(DEVICE)))


@pytest.mark.parametrize("drafted", [40, None, 0])
def test_what_is_left_is_drawn_by_inverse_cdf(drafted: int | None) -> None:
    """Rows without a q, with all of p refused, and of another tree's nodes among them; 0: a round without any q."""
    p, q = torch.randn(4, 3, 5000, device=DEVICE), torch.randn(4, 2, drafted or 5000, device=DEVICE)
    p[0, 1, ::3] = p[3, 0, 2:] = -torch.inf
    ids = torch.randperm(5000, device=DEVICE)[:drafted].int() if drafted == 40 else None
    refused = torch.tensor([[-1, 7], [3, 3], [-1, -1], [0, 1]], device=DEVICE)
    nodes, weight = torch.tensor([1, 2, 0, 0], device=DEVICE), torch.tensor([1.0, 0.4, 0.9, 1.0], device=DEVICE)
    rest = sampling.Rest(p, nodes, weight.double(), refused)
    index = torch.tensor([1, 0, -1, 1], device=DEVICE)
    rest = rest if drafted == 0 else rest._replace(q_logits=q, q_index=index, draft_ids=ids)
    for uniform in UNIFORMS:
        given = rest, torch.full((4,), uniform, device=DEVICE)
        found, expected = functions.draw_rest(*given), in_torch(sampling.draw_rest)(*given)  # type: ignore[operator]
        assert torch.equal(found, expected) and found[3] == 5000


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_compared_as_in_torch(kind: str) -> None:
    """With zeros of p and q, a row where p = q, rows without q and rows that are no distributions; in two chunks."""
    p, q = torch.randn(2, 4, 5000, device=DEVICE), torch.randn(2, 3, 5000, device=DEVICE)
    p[0, 1, ::3] = q[0, 2, 1::2] = -torch.inf
    q[1, 0], p[1, 2, 0], p[1, 3, 0] = p[1, 0], torch.nan, torch.inf
    ids, index = torch.randperm(5000, device=DEVICE)[:4500].int(), torch.tensor([[2, -1, 0, 2], [0, 1, 1, 1]])
    for draft_ids in (None, ids):
        given = p, q if draft_ids is None else q[..., :4500], draft_ids, index.to(DEVICE)
        if kind == RESIDUAL:
            weight = torch.rand(2, 4, device=DEVICE).double()
            given = *given[:2], weight, given[3], given[2]
            found, expected = functions.residual_mass(*given), in_torch(sampling.residual_mass)(*given)  # type: ignore[operator]
        else:
            given = *given[:2], divergence(kind), *given[2:]
            found, expected = functions.divergence_rows(*given), in_torch(divergence_rows)(*given)  # type: ignore[operator]
            if given[2].infinite_on_reduced_vocabulary and draft_ids is not None:
                assert found is NotImplemented
                continue
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5, equal_nan=True)
    assert kind == RESIDUAL or functions.divergence_rows(p, p, divergence(kind))[0, 0] == 0


def test_parts_of_trees() -> None:
    """The kept nodes lie in any order, the root first; some parents are dropped."""
    tree = drawn_tree("tree", None, torch.float32, 3)
    fields = [tree.tokens, tree.parents, tree.scores, tree.q_index, tree.tokens.flip(1), tree.drawn]
    nodes = torch.tensor([[0, 2, 3, 1, 7], [0, 1, 2, 3, 4], [0, 6, 4, 5, 2]])
    given = [None if x is None else x.to(DEVICE) for x in (*fields, nodes)]
    for without in ((), (4, 5)):
        some = [None if place in without else x for place, x in enumerate(given)]
        found, expected = functions.keep_nodes(*some), in_torch(functional.keep_nodes)(*some)  # type: ignore[operator]
        for one, other in zip((*found[:6], *found[6]), (*expected[:6], *expected[6]), strict=True):
            assert one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("kind", ["tree", "chain", "likely tokens"])
@pytest.mark.parametrize(
    "spec", ["tilted:1", "tilted:exact_start=2", "fuzzy:js:0.3", "relaxed:3", "draft-only:budget=3"]
)
def test_rules_decide_as_in_torch(spec: str, kind: str, greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of some hundred tokens, of none before the root, and of few ids: many n-grams are repeated."""
    tree, logits = drawn_tree(kind, 12 if kind == "tree" else None, torch.float32, 3), torch.randn(3, 8, 23)
    tree.tokens[1:, 1:] %= 3
    texts = TokenHistory([[5] * n + torch.randint(0, 3, (m,)).tolist() + [int(x)] for n, m, x in
                          zip((0, 0, 9), (0, 300, 2), tree.tokens[:, 0])], device=DEVICE)  # fmt: skip
    round = on_device(RoundInput(tree, logits, logits, greedy, torch.rand(3, 8, 3), texts=texts)).round
    verdicts = []
    for in_triton in (True, False):
        for name in OF_RULES:
            if in_triton:
                monkeypatch.setitem(functional.KERNELS[name], DEVICE, getattr(functions, name))
            else:
                monkeypatch.delitem(functional.KERNELS[name], DEVICE)
        verdicts.append(verdict_of(parse_rule(spec), replace(round, tree=replace(round.tree))))
    assert_same(*verdicts)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngrams_of_text_and_path(n: int) -> None:
    tree = drawn_tree("tree", None, torch.float32, 3)
    tree.tokens %= 3
    answers = [[*torch.randint(0, 3, (m,)).tolist(), int(x)] for m, x in zip((0, 30, 2), tree.tokens[:, 0])]
    texts, tree = (
        TokenHistory(answers, device=DEVICE),
        replace(tree, tokens=tree.tokens.to(DEVICE), parents=tree.parents.to(DEVICE)),
    )
    given = tree.tokens, texts, tree, n
    assert torch.equal(functions.completes_ngram(*given), in_torch(completes_ngram)(*given))  # type: ignore[operator]
    rows, nodes = torch.tensor([0, 1, 1, 2]).to(DEVICE), torch.tensor([4, 0, 7, 5]).to(DEVICE)
    for columns in (None, torch.tensor([2, -1, 0], device=DEVICE)):
        found = functions.repeating_tokens(rows, nodes, texts, tree, n, 4, columns)
        assert torch.equal(found, in_torch(repeating_tokens)(rows, nodes, texts, tree, n, 4, columns))  # type: ignore[operator]
        assert found.any() and not found[:, 3].any()
