"""Trees with drawn nodes: whatever decides their shape, the output has the target's distribution."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import Tensor

from fsd_infer import FsdError
from fsd_infer.drafters.drawing import Drawing, Shares, accepted_drafts
from fsd_infer.drafters.graft import kept_of, union_of
from fsd_infer.drafters.growth import TreeSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.rules import Exact, RuleInputs, parse_rule
from fsd_infer.trees.costs import PRIORS
from fsd_infer.trees.estimates import RuleProfile, TreeMemory
from fsd_infer.trees.policy import TreePolicy
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree, Draws
from fsd_infer.trees.visits import likeliest
from tests.rules_toy import ALARM, LENGTH, Toy, V, child_of, p_value, simulate

ROWS = 10_000


class TableSession(TreeSession):
    """Grows trees by :class:`TreeSession` with a table of logits per context instead of a model."""

    def __init__(self, toy: GrownToy, contexts: Tensor, generator: torch.Generator) -> None:
        batch, shape = len(contexts), toy.shape_for(len(contexts))
        self.toy, self.root, self.shape = toy, contexts, shape
        self.drafter = SimpleNamespace(vocabulary=V)  # type: ignore[assignment]
        self.device, self.draft_bonus, self.lengths = torch.device("cpu"), 0.0, torch.zeros(batch, dtype=torch.long)
        self.cache = SimpleNamespace(after_text=lambda *_: (None, None))  # type: ignore[assignment]
        self.request = DraftRequest(batch, 9, False, toy.scores, generator, draws=Draws.TREE)
        self._visits, self._drawing, self._where = torch.zeros(0), None, contexts[:, None]

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        return self.toy.q[self._where], self.toy.draft_ids

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        self._where = child_of(self._where.gather(1, parents), tokens)
        return self.toy.q[self._where]

    def _draws(self) -> Drawing:
        drawing = super()._draws()
        drawing.least = drawing.least if self.toy.least is None else math.log(self.toy.least)
        return drawing

    def _kept(self, tree: DraftTree) -> DraftTree:
        if not self.toy.meddles:
            return super()._kept(tree)
        # keep or drop what need not be kept by the values of the draws, the worst that a choice of nodes can do
        draws = (tree.tokens * tree.drawn).sum(1, keepdim=True)
        wanted = (tree.tokens + draws) % 2 == 0
        scores = torch.where(wanted | tree.held, tree.scores, -math.inf)
        lost = (tree.ancestors & (scores == -math.inf)[:, None]).any(-1)
        tree = replace(tree, scores=scores.masked_fill(lost & ~tree.held, -math.inf))
        return tree.keep(likeliest(tree.scores, tree.parents, self.shape.depth, 0.0, 99, tree.held))


@dataclass(frozen=True)
class GrownToy(Toy):
    """A toy whose trees grow as those of draft heads do, with drawn nodes.

    Attributes:
        shape: of the trees.
        least: of :class:`Drawing`; None: what the session gives.
        auto: whether the tree of each round is chosen as ``tree="auto"`` does.
        grafts: whether each root and its first child get a further child that is no function of q.
        meddles: whether the draws decide which other nodes are verified.
    """

    shape: TreeShape = field(default_factory=lambda: TreeShape(3, 3, 8))
    least: float | None = 0.05
    auto: bool = False
    grafts: bool = False
    meddles: bool = False

    def shape_for(self, batch: int) -> TreeShape:
        memory, profile = TreeMemory(PRIORS["cpu"]), RuleProfile(0.0, "exact")
        return TreePolicy(memory, batch, profile, self.shape, learns=False).choose(batch) if self.auto else self.shape

    def draft(self, contexts: Tensor, generator: torch.Generator) -> tuple[DraftTree, Tensor]:
        tree = TableSession(self, contexts, generator).draft(torch.zeros_like(contexts))
        if self.grafts:
            tree = self._grafted(tree, contexts)
        where = contexts[:, None].repeat(1, tree.tokens.shape[1])
        for node in range(1, where.shape[1]):
            above = where.gather(1, tree.parents[:, node : node + 1])[:, 0]
            where[:, node] = torch.where(tree.is_draft[:, node], child_of(above, tree.tokens[:, node]), above)
        return tree, where

    def _grafted(self, tree: DraftTree, contexts: Tensor) -> DraftTree:
        chain = torch.stack([torch.zeros_like(contexts), contexts % V, (contexts + 1) % V], 1)
        side = DraftTree.chain(
            chain, torch.empty(len(chain), 0, V), scores=torch.tensor([0.0, -0.7, -1.4]).repeat(len(chain), 1)
        )
        union = union_of(tree, side, 3)
        return kept_of(union, tree, likeliest(union.scores, union.parents, 3, 0.0, self.shape.nodes + 2, union.held))


def target_distribution(toy: Toy) -> np.ndarray:
    """[V**LENGTH] what the target alone would emit."""
    p, distribution = softmax(toy.scores(toy.p).double().numpy(), axis=-1), []
    for tokens in itertools.product(range(V), repeat=LENGTH):
        context, chance = 0, 1.0
        for token in tokens:
            chance *= p[context, token]
            context = V * context + 1 + token
        distribution.append(chance)
    return np.array(distribution)


def grown(
    seed: int = 11, processed: bool = False, reduced: bool = False, temperature: float = 1.0, **options: Any
) -> GrownToy:
    toy = Toy.make(seed, processed=processed, reduced=reduced, temperature=temperature)
    return GrownToy(toy.p, toy.q, False, processed, toy.draft_ids, toy.parents, temperature, **options)


GROWN = {
    "tree": grown(), "cold": grown(temperature=0.7), "hot": grown(temperature=1.6),
    "top-k": grown(seed=12, processed=True), "reduced": grown(seed=13, reduced=True),
    "reduced top-k": grown(seed=14, reduced=True, processed=True),
    "drawn chain": grown(shape=TreeShape(3, 1, 4)), "few nodes": grown(shape=TreeShape(3, 3, 4)),
    "stops early": grown(shape=TreeShape(3, 2, 6, 0.5)), "auto": grown(auto=True, least=None),
    "grafts": grown(seed=15, grafts=True), "meddling": grown(seed=16, meddles=True),
    "all draw": grown(seed=17, least=1e-3), "meddling, top-k": grown(seed=18, meddles=True, processed=True),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWN)
def test_the_output_has_the_targets_distribution(name: str) -> None:
    toy = GROWN[name]
    tree, _ = toy.draft(torch.zeros(64, dtype=torch.long), torch.Generator().manual_seed(1))
    assert tree.drawn is not None and tree.drawn.any(), "the toy has drawn nodes"
    assert tree.drawn.sum(1).max() > 1 or toy.auto, "and several"
    codes = simulate(toy, Exact(), ROWS, seed=3).codes
    assert p_value(codes, target_distribution(toy)) > ALARM


def test_a_drawn_node_that_draws_takes_one_place() -> None:
    """As many draws as places: a drawn node is verified in any case, so a draw below it costs its own place alone."""
    chain, tree = grown(shape=TreeShape(3, 1, 4), least=1e-6), grown(shape=TreeShape(3, 2, 5), least=1e-6)
    for toy in (chain, tree):
        drafted, _ = toy.draft(torch.zeros(64, dtype=torch.long), torch.Generator().manual_seed(1))
        assert drafted.drawn is not None and int(drafted.drawn.sum(1).min()) == 3
        assert drafted.tokens.shape[1] <= toy.shape.nodes


def test_a_wrong_q_is_noticed() -> None:
    """The check above has the power to see a test of drafts by q instead of the rest of q."""
    toy, wrong = GROWN["tree"], target_distribution(GROWN["tree"])
    real = Drawing._drawn

    def from_all(self: Drawing, scores: Tensor, draws: Tensor) -> Tensor:
        return real(self, scores / 2, draws)  # drawn from a flatter distribution than the one that the tree states

    Drawing._drawn = from_all  # type: ignore[method-assign]
    try:
        codes = simulate(toy, Exact(), ROWS, seed=3).codes
    finally:
        Drawing._drawn = real  # type: ignore[method-assign]
    assert p_value(codes, wrong) < ALARM


@pytest.mark.parametrize("width", [1, 2, 3])
def test_acceptance_is_that_of_the_mixed_scheme(width: int) -> None:
    """At a root with C and a child drawn from the rest of q: p(C) + Σ min(p, q_r) outside C, averaged over draws."""
    toy = grown(seed=21, shape=TreeShape(1, width, width + 1), least=1e-3)
    p, q = (softmax(x[0].double().numpy()) for x in (toy.p, toy.q))
    order = np.argsort(-q)
    fixed = [c for c in order[: width - 1] if q[c] * (1 - 0.2 - 0.75 * q.max()) >= 1e-3]
    rest = q.copy()
    rest[fixed] = 0
    wanted = p[fixed].sum() + np.minimum(p, rest / rest.sum()).sum()
    rows = torch.zeros(ROWS, dtype=torch.long)
    round = toy.round(rows, torch.Generator().manual_seed(5))
    chance = RuleInputs(round).chance.masked_fill(~round.tree.is_draft, 0.0).sum(1)
    assert abs(float(chance.mean()) - wanted) < 5 * float(chance.std()) / ROWS**0.5 + 1e-6
    assert wanted > p[order[:width]].sum() or width == V


@pytest.mark.parametrize("seed", range(3))
def test_what_is_learned_is_the_share_of_drafts_that_is_accepted(seed: int) -> None:
    """Accepted per expected drafts of each kind, over many rounds of one tree shape. q is sharper than p."""
    toy = grown(seed=30 + seed, shape=TreeShape(2, 3, 9), least=0.02)
    toy = replace(toy, q=toy.q * 1.5)
    contexts = torch.randint(0, 21, (ROWS,), generator=torch.Generator().manual_seed(seed))
    round = toy.round(contexts, torch.Generator().manual_seed(seed))
    verdict, tree, chance = Exact()(round), round.tree, RuleInputs(round).chance
    sums = accepted_drafts(tree, verdict.path, verdict.accepted).double().sum(0).view(2, 2, 2)
    shares, step = Shares(), (tree.scores - tree.scores.gather(1, tree.parents)).exp()
    for _ in range(30):
        shares.learn((sums / 20).flatten().tolist())
    reach = torch.where(tree.depths == 1, 1.0, chance.gather(1, tree.parents)) * tree.is_draft
    for drawn in (False, True):
        for below in (False, True):
            mine = (tree.drawn == drawn) & ((tree.depths > 1) == below) & tree.is_draft
            wanted = float((reach * chance)[mine].sum() / (reach * step)[mine].sum())
            seen = float(sums[int(drawn), int(below), 0] / sums[int(drawn), int(below), 1])
            assert seen == pytest.approx(wanted, rel=0.06)
            assert drawn or shares.of(drawn, below) == pytest.approx(seen, rel=0.02)


def test_a_ratio_that_was_applied_is_not_learned_twice() -> None:
    """Drawn drafts are drafted with the learned ratio in their scores: learning goes to the ratio, then stays there."""
    shares = Shares()
    for _ in range(400):
        shares.learn([0, 0, 0, 0, 0.6 * 10, shares.of(True, 0) * 10, 0, 0])
    assert shares.of(True, 0) == pytest.approx(0.6, rel=1e-3) and shares.of(True, 1) == shares.of(False, 0) == 1.0
    few, many = (Drawing(None, torch.Generator().manual_seed(0), 8, 0.1, each) for each in (shares, None))
    logits = torch.tensor([[[2.0, 1.4, 0.5, 0.2, 0.0]]])
    drafted = [
        each.propose(logits, torch.zeros(1, 1), torch.zeros(1, 1, 0, dtype=torch.bool), 4) for each in (few, many)
    ]
    fixed = [int(((log_q > -math.inf) & ~drawn).sum()) for log_q, _, drawn in drafted]
    assert fixed[0] > fixed[1], "the fewer draws are accepted, the more children are fixed"


def test_a_round_without_any_acceptance_does_not_end_the_drafts_of_a_kind() -> None:
    """A batch of many answers to one prompt may expect a hundred acceptances and see none."""
    shares = Shares()
    for _ in range(3):
        shares.learn([0, 500, 0, 0, 0, 500, 0, 0])
    assert 0 < shares.of(False, 0) == shares.of(True, 0) < 0.2
    shares.learn([0, 0, 0, 0, 400, 500 * shares.of(True, 0), 0, 0])
    assert shares.of(True, 0) == pytest.approx(0.8), "and what is accepted later is learned"


def test_block_verification_refuses_trees_with_drawn_nodes() -> None:
    toy = GROWN["tree"]
    round = toy.round(torch.zeros(8, dtype=torch.long), torch.Generator().manual_seed(2))
    with pytest.raises(FsdError, match="must form a chain"):
        parse_rule("exact:block=true")(round)
    assert [parse_rule(rule).draws for rule in ("exact:block=true", "exact:draw=false")] == [Draws.CHAIN, Draws.NONE]
