"""Drawn nodes: how many there are, how often they are accepted, and what is learned of that."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import chisquare

from fsd_core.errors import FsdError
from fsd_infer import Drafter, Target
from fsd_infer.backends.cpu import functions
from fsd_infer.drafters import EagleDrafter, GraftedDrafter, LMDrafter, LookupDrafter
from fsd_infer.drafters.drawing import AcceptanceRatios, Drawing, accepted_and_expected
from fsd_infer.drafters.forced import ForcedDrafter
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.engine.plan import draws_of
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.rules import Exact, RoundInput, RuleInputs, parse_rule
from fsd_infer.rules.distributions import block_test
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import Draws
from tests.families import VOCAB, tiny_model
from tests.test_drawn_distributions import Grown, round_of, trees_of
from tests.tree_rounds import take


@pytest.mark.parametrize("shape", [TreeShape(3, 1, 4), TreeShape(3, 2, 5)], ids=str)
def test_a_drawn_node_that_draws_takes_one_place(shape: TreeShape) -> None:
    """As many draws as places: a drawn node is verified in any case, so a draw below it costs its own place alone."""
    for tree, _ in trees_of(Grown(4, shape, least=1e-6)):
        assert tree.drawn is not None and int(tree.drawn.sum()) == 3 and tree.tokens.shape[1] <= shape.nodes


def test_a_draw_follows_q_outside_the_fixed_children() -> None:
    rows, logits = 10_000, torch.tensor([2.0, 1.4, 0.5, 0.2, 0.0])
    drawing = Drawing(lambda scores: scores / 0.8, torch.Generator().manual_seed(0), 8, 0.1)
    none_seen = torch.zeros(rows, 1, 0, dtype=torch.bool)
    log_q, entries, drawn = drawing.propose(logits.expand(rows, 1, -1), torch.zeros(rows, 1), none_seen, 4)
    fixed = entries[0, 0, (log_q[0, 0] > -math.inf) & ~drawn[0, 0]]
    rest = (logits / 0.8).index_fill(0, fixed, -math.inf).softmax(-1)
    seen = entries[drawn].bincount(minlength=5)
    assert len(fixed) > 0 and seen.sum() == rows and not seen[fixed].any()
    left = rest > 0
    assert chisquare(seen[left], rows * rest[left].double() / rest[left].double().sum()).pvalue > 1e-6


@pytest.mark.parametrize("width", [1, 2, 3])
def test_acceptance_is_that_of_the_mixed_scheme(width: int) -> None:
    """At a root with C and a child drawn from the rest of q: p(C) + Σ min(p, q_r) outside C, averaged over draws."""
    toy = Grown(4, TreeShape(1, width, width + 1), least=1e-3, seed=21)
    p, q = (softmax(x[0].double().numpy()) for x in toy.logits)
    order = np.argsort(-q)
    fixed = [c for c in order[: width - 1] if q[c] * (1 - 0.2 - 0.75 * q.max()) >= 1e-3]
    rest = q.copy()
    rest[fixed] = 0
    wanted = p[fixed].sum() + np.minimum(p, rest / rest.sum()).sum()
    round, probability, _ = round_of(toy)
    accepted = RuleInputs(round).accept_prob.masked_fill(~round.tree.is_draft, 0.0).sum(1)
    assert float((probability * accepted).sum()) == pytest.approx(wanted, abs=1e-5)
    assert wanted > p[order[:width]].sum()


def many_rounds(toy: Grown, rows: int, seed: int) -> RoundInput:
    """Rounds with trees as they are drawn."""
    round, probability, _ = round_of(toy)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(probability, rows, replacement=True, generator=generator)
    uniforms = torch.rand(rows, *round.tree.tokens.shape[1:], 3, generator=generator)
    logits, scores = round.logits[drawn], round.scores[drawn]
    return replace(round, tree=take(round.tree, drawn), logits=logits, scores=scores, uniforms=uniforms, texts=None)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_learned_is_the_share_of_drafts_that_is_accepted(seed: int) -> None:
    """Accepted per expected drafts of each kind, over many rounds of one tree shape."""
    round = many_rounds(Grown(4, TreeShape(2, 3, 9), least=0.02, seed=30 + seed), 10_000, seed)
    verdict, tree, accept_prob = Exact()(round), round.tree, block_test(RuleInputs(round)).accept_prob
    of_rows = accepted_and_expected(verdict.path, verdict.accepted, tree)
    few = functions.accepted_and_expected(verdict.path[:20], verdict.accepted[:20], take(tree, torch.arange(20)))
    torch.testing.assert_close(few, of_rows[:20])
    sums = of_rows.double().sum(0).view(2, 2, 2)
    ratios, step = AcceptanceRatios(), (tree.scores - tree.scores.gather(1, tree.parents)).exp()
    for _ in range(30):
        ratios.learn((sums / 20).flatten().tolist())
    reach = torch.where(tree.depths == 1, 1.0, accept_prob.gather(1, tree.parents)) * tree.is_draft
    for drawn in (False, True):
        for below in (False, True):
            mine = (tree.drawn == drawn) & ((tree.depths > 1) == below) & tree.is_draft
            wanted = float((reach * accept_prob)[mine].sum() / (reach * step)[mine].sum())
            seen = float(sums[int(drawn), int(below), 0] / sums[int(drawn), int(below), 1])
            assert seen == pytest.approx(wanted, rel=0.06)
            assert drawn or ratios.ratio(drawn, below) == pytest.approx(seen, rel=0.02)


def test_a_ratio_that_was_applied_is_not_learned_twice() -> None:
    """Drawn drafts are drafted with the learned ratio in their scores: learning goes to the ratio, then stays there."""
    ratios = AcceptanceRatios()
    for _ in range(400):
        ratios.learn([0, 0, 0, 0, 0.6 * 10, ratios.ratio(True, 0) * 10, 0, 0])
    assert (
        ratios.ratio(True, 0) == pytest.approx(0.6, rel=1e-3) and ratios.ratio(True, 1) == ratios.ratio(False, 0) == 1.0
    )
    few, many = (Drawing(None, torch.Generator().manual_seed(0), 8, 0.1, each) for each in (ratios, None))
    logits = torch.tensor([[[2.0, 1.4, 0.5, 0.2, 0.0]]])
    drafted = [
        each.propose(logits, torch.zeros(1, 1), torch.zeros(1, 1, 0, dtype=torch.bool), 4) for each in (few, many)
    ]
    fixed = [int(((log_q > -math.inf) & ~drawn).sum()) for log_q, _, drawn in drafted]
    assert fixed[0] > fixed[1], "the fewer draws are accepted, the more children are fixed"


def test_a_round_without_any_acceptance_does_not_end_the_drafts_of_a_kind() -> None:
    """A batch of many answers to one prompt may expect a hundred acceptances and see none."""
    ratios = AcceptanceRatios()
    for _ in range(3):
        ratios.learn([0, 500, 0, 0, 0, 500, 0, 0])
    assert 0 < ratios.ratio(False, 0) == ratios.ratio(True, 0) < 0.2
    ratios.learn([0, 0, 0, 0, 400, 500 * ratios.ratio(True, 0), 0, 0])
    assert ratios.ratio(True, 0) == pytest.approx(0.8), "and what is accepted later is learned"


def test_which_rules_draw_chains_and_which_no_nodes() -> None:
    assert parse_rule("exact:block=true").draws is Draws.CHAIN and parse_rule("exact").draws is Draws.ANY
    assert {parse_rule(rule).draws for rule in ("exact:block=false", "tilted", "draft-only:draw=true")} == {Draws.TREE}
    assert {parse_rule(rule).draws for rule in ("exact:draw=false", "tilted:draw=false", "typical")} == {Draws.NONE}
    with pytest.raises(FsdError, match="block=true draws all drafts, and draw=false none"):
        parse_rule("exact:block=true:draw=false")


def test_a_request_draws_chains_where_its_rules_and_its_drafter_do() -> None:
    """Of a small LM, unless a wider tree was asked for. Not of heads, nor where other drafts are merged with its."""
    target = Target(tiny_model("llama"))
    head = EagleDrafter(EagleHead(EagleConfig.for_target(target)), target)
    by_default, chosen = LMDrafter(target, target), choose_trees(LMDrafter(target, target), target)
    fixed = by_default.with_shape(TreeShape(4, 4, 16))
    grafted = GraftedDrafter(by_default, LookupDrafter(VOCAB))
    guided = ForcedDrafter(by_default, lambda row, answer: [], VOCAB)

    def draws(drafter: Drafter, *rules: str, temperature: float = 0.7) -> Draws:
        return draws_of(drafter, [parse_rule(rule) for rule in rules], temperature)

    for small in (by_default, chosen, by_default.with_shape(TreeShape.chain(3))):
        assert draws(small, "exact") is draws(small, "exact", "exact:block=true") is Draws.CHAIN
        assert draws(small, "exact:block=false") is draws(small, "tilted") is Draws.TREE
        assert draws(small, "exact", "tilted") is draws(small, "exact", "exact:block=false") is Draws.TREE
        assert draws(small, "exact", "typical") is draws(small, "exact", temperature=0.4) is Draws.NONE
        assert draws(small, "exact:block=true", temperature=0.4) is Draws.CHAIN
    for other in (head, fixed, grafted, guided):
        assert draws(other, "exact") is Draws.TREE and draws(other, "exact:block=true") is Draws.CHAIN
