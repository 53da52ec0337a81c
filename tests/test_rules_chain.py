"""Rules on chains of drafts that are sampled from q, by hand and by their definition; tests/test_rules_tree.py has
what holds on trees too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fsd_infer.errors import FsdError
from fsd_infer.rules import Exact, Fuzzy, FuzzyStrict, Source, Verification
from fsd_infer.tree import DraftTree
from tests.tree_rounds import INF, assert_same, chain_round


def by_hand(first: float, second: float, draft: int, q: list[float]) -> Verification:
    """One draft; p = (.5, .3, .2, 0)."""
    target = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().expand(1, 2, 4)
    drafter = torch.tensor([[q]]).log()
    tree = DraftTree.chain(torch.tensor([[0, draft]]), drafter, q_scores=drafter)
    uniforms = torch.tensor([[[first, second, 0.5], [0.0, 0.6, 0.5]]])
    return Verification(tree, target, target, False, uniforms)


def test_exact_test_and_residual_by_hand() -> None:
    q = [0.2, 0.6, 0.2, 0.0]
    kept = Exact()(by_hand(0.49, 0.0, draft=1, q=q))  # p/q = .5
    assert kept.tokens.tolist() == [[1, 1]]  # the leaf draws at .6
    assert kept.sources.tolist() == [[Source.EXACT, Source.TARGET]]
    refused = Exact()(by_hand(0.51, 0.99, draft=1, q=q))  # the residual is all on token 0
    assert refused.accepted.tolist() == [0]
    assert refused.tokens.tolist() == [[0, 0]]
    assert refused.sources.tolist() == [[Source.TARGET, Source.TARGET]]
    opened = Fuzzy("tv", 0.31)(by_hand(0.51, 0.99, draft=1, q=q))
    assert opened.tokens.tolist() == [[1, 1]]
    assert opened.sources.tolist() == [[Source.GATE, Source.TARGET]]
    kl = 0.2 * math.log(0.2 / 0.5) + 0.6 * math.log(0.6 / 0.3)
    assert opened.spent[0].tolist() == pytest.approx([kl, 0.0], abs=1e-6)
    lucky = Fuzzy("tv", 0.31)(by_hand(0.49, 0.99, draft=1, q=q))  # would have passed anyway, but the law is q
    assert lucky.sources[0, 0] == Source.EXACT
    assert lucky.spent[0, 0].item() == pytest.approx(kl, abs=1e-6)
    closed = Fuzzy("tv", 0.29)(by_hand(0.51, 0.99, draft=1, q=q))
    assert closed.tokens.tolist() == [[0, 0]]
    # strict: a closed gate draws from p, whatever the exact test says of the draft
    strict = FuzzyStrict("tv", 0.29)(by_hand(0.31, 0.99, draft=1, q=q))  # p of the draft is .3
    assert strict.tokens.tolist() == [[2, 0]]
    assert FuzzyStrict("tv", 0.29)(by_hand(0.29, 0.99, draft=1, q=q)).tokens.tolist() == [[1, 1]]


def test_greedy_chains_are_trees_of_width_one() -> None:
    """With one-hot q the draft is accepted iff it is the target's argmax, whether or not q_scores came along."""
    for seed in range(10):
        round = chain_round(seed, greedy=True)
        tokens = round.tree.tokens.clone()
        tokens[:, 1:] = torch.where(torch.rand(8, 4) < 0.7, round.logits[:, :-1].argmax(-1), tokens[:, 1:])
        round = replace(round, tree=replace(round.tree, tokens=tokens))
        verdict = Exact()(round)
        match = (tokens[:, 1:] == round.logits[:, :-1].argmax(-1)).long().cumprod(-1).sum(-1)
        assert torch.equal(verdict.accepted, match)
        plain = replace(round, tree=replace(round.tree, q_scores=None))
        assert_same(verdict, Exact()(plain))
        assert Fuzzy("js", INF)(plain).accepted.tolist() == [4] * 8


def test_sampled_drafts_have_to_be_a_chain() -> None:
    round = chain_round(0, length=2)
    parents = torch.zeros_like(round.tree.parents)
    with pytest.raises(FsdError, match="must form a chain"):
        Exact()(replace(round, tree=replace(round.tree, parents=parents)))
