"""Every rule on trees with drawn nodes, by enumeration of all draws: no value of a draw shifts what a context emits."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import rel_entr, softmax
from torch import Tensor

from fsd_infer.drafters.drawing import ChainDrawing, Drawing
from fsd_infer.drafters.growth import TreeSession
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.rules import RoundInput, RuleInputs, TokenHistory, VocabRows, parse_rule
from fsd_infer.rules.optimal import clipped_distribution, least_divergent
from fsd_infer.rules.walk import _Walk
from fsd_infer.trees.shape import TreeShape
from fsd_infer.trees.tree import DraftTree, Draws, select_nodes
from tests.output_probs import output_probs
from tests.tree_rounds import masked

LEVELS = 4  # contexts have at most as many tokens
RULES = (
    "fuzzy:js:0.1", "fuzzy:js:inf:min_p=0.3", "fuzzy:kl_qp:0.3:gate=processed", "fuzzy-strict:js:0.1",
    "draft-only", "random:0.5", "tilted:1:exact_ngram_size=0", "tilted:0.3:min_p=0.3:exact_ngram_size=1",
    "tilted:1:gate=0.1:exact_ngram_size=0",
    "lenient:0.5", "typical:0.2:0.5", "relaxed:2:0.3", "threshold:0.4:0.7", "cascade-token:0.4", "ensemble:0.6",
    "mars:0.7", "cactus:0.1", "tilted:1:exact_ngram_size=0:budget=0.05", "fuzzy:js:inf:exact_ngram_size=1",
)  # fmt: skip


@dataclass(frozen=True)
class Grown:
    """Trees of one root that grow as those of draft heads do, over a vocabulary of V tokens."""

    vocabulary: int
    shape: TreeShape
    temperature: float = 1.0
    keep: int = 0  # top-k
    top_p: float = 1.0
    reduced: bool = False
    meddles: bool = False  # whether draws decide which other nodes are verified
    sure: bool = False  # whether the drafter is sure of two tokens at the root, so that it draws none there
    least: float | None = None  # of :class:`Drawing`; None: what the session gives
    draws: Draws = Draws.TREE
    known: int = 99  # the depth from which on no q is known, as beyond a small LM's context
    seed: int = 0

    @property
    def logits(self) -> tuple[Tensor, Tensor]:
        """[contexts, V] of the target and [contexts, Vd] of the drafter. The root is context 0."""
        generator, v = torch.Generator().manual_seed(self.seed), self.vocabulary
        p = torch.randn(sum(v**level for level in range(LEVELS + 1)), v, generator=generator) * 1.2
        q = p + torch.randn(p.shape, generator=generator) * 0.8
        if self.sure:
            q[0] = torch.arange(v).float().mul(-6.0).add(5.5).clamp_max(0.0)
        return p, q if self.ids is None else q[:, self.ids]

    @property
    def ids(self) -> Tensor | None:
        return torch.arange(self.vocabulary - 1, -1, -2) if self.reduced else None

    def process(self, scores: Tensor) -> Tensor:
        scores = masked(scores, self.temperature, keep=self.keep) if self.keep else scores / self.temperature
        if self.top_p < 1:
            best, order = scores.softmax(-1).sort(-1, descending=True)
            dropped = torch.zeros_like(best, dtype=torch.bool).scatter(-1, order, best.cumsum(-1) - best >= self.top_p)
            scores = scores.masked_fill(dropped, -math.inf)
        return scores

    def process_draft(self, tree: DraftTree) -> Tensor:
        if self.ids is None:
            return self.process(tree.q_logits)
        whole = torch.full((*tree.q_logits.shape[:2], self.vocabulary), -math.inf)
        whole[..., self.ids] = tree.q_logits
        return self.process(whole)


class Session(TreeSession):
    """Grows one tree from a table of logits, with draws that are given."""

    def __init__(self, toy: Grown, q: Tensor) -> None:
        self.toy, self.q = toy, q
        self.shape = replace(toy.shape, width=min(toy.shape.width, q.shape[1]))
        self.drafter = SimpleNamespace(vocabulary=q.shape[1])  # type: ignore[assignment]
        self.device, self.draft_bonus, self.lengths = torch.device("cpu"), 0.0, torch.zeros(1, dtype=torch.long)
        self.cache = SimpleNamespace(after_text=lambda *_: (None, None))  # type: ignore[assignment]
        self.request = DraftRequest(1, 9, False, toy.process, None, draws=toy.draws)
        self._visits, self._drawing = torch.zeros(0), None
        self._where = torch.zeros(1, 1, dtype=torch.long)

    def _read_roots(self) -> tuple[Tensor, Tensor | None]:
        return self.q[self._where], self.toy.ids

    def _read_nodes(self, tokens: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        self._where = self.toy.vocabulary * self._where.gather(1, parents) + 1 + tokens
        return self.q[self._where]

    def _new_drawing(self) -> Drawing | ChainDrawing:
        drawing = super()._new_drawing()
        if isinstance(drawing, Drawing) and self.toy.least is not None:
            drawing.min_log_prob = math.log(self.toy.least)
        return drawing

    def _select_nodes(self, tree: DraftTree) -> DraftTree:
        if not self.toy.meddles:
            tree = super()._select_nodes(tree)
            tree.q_index = tree.q_index.masked_fill(tree.depths >= self.toy.known, -1)
            return tree
        draws = (tree.tokens * tree.drawn * torch.arange(1, 1 + tree.tokens.shape[1])).sum(1, keepdim=True)
        scores = tree.scores.masked_fill(~tree.pinned & ((tree.tokens + draws) % 3 == 0), -math.inf)
        lost = (tree.ancestors & (scores == -math.inf)[:, None]).any(-1) & ~tree.pinned
        nodes = select_nodes(scores.masked_fill(lost, -math.inf), tree.parents, self.shape.depth, 0.0, 99, tree.pinned)
        return replace(tree, scores=scores.masked_fill(lost, -math.inf)).keep(nodes)


class Given:
    """Draws that follow ``plan``, the likeliest entry of each further one, and the chances of all that might be."""

    def __init__(self, plan: tuple[int, ...]) -> None:
        self.plan, self.made = plan, list[Tensor]()

    def drawn_entries(self, scores: Tensor, draws: Tensor, generator: torch.Generator | None) -> Tensor:
        entries = torch.zeros(draws.shape, dtype=torch.long)
        for row, place in draws.nonzero().tolist():
            q = scores[row, place].double().softmax(-1)
            number = len(self.made)
            entries[row, place] = self.plan[number] if number < len(self.plan) else q.argmax()
            self.made.append(q)
        return entries


@cache
def trees_of(toy: Grown) -> list[tuple[DraftTree, float]]:
    """All trees with their probabilities."""
    _, q = toy.logits
    found: list[tuple[DraftTree, float]] = []
    plans: list[tuple[int, ...]] = [()]
    patch = pytest.MonkeyPatch()
    while plans:
        given = Given(plans.pop())
        patch.setattr("fsd_infer.drafters.drawing.drawn_entries", given.drawn_entries)
        tree = Session(toy, q).draft(torch.zeros(1, dtype=torch.long))
        if len(given.made) > len(given.plan):  # the next draw is not planned yet
            plans += [(*given.plan, entry) for entry in given.made[len(given.plan)].nonzero()[:, 0].tolist()]
        else:
            found.append((tree, math.prod(float(chances[entry]) for chances, entry in zip(given.made, given.plan))))
    patch.undo()
    return found


@cache
def round_of(toy: Grown) -> tuple[RoundInput, Tensor, Tensor]:
    """A round with all trees, one a row; their probabilities [B]; and the context of each node [B, N]."""
    trees, chances = zip(*trees_of(toy), strict=True)
    count, width = max(tree.tokens.shape[1] for tree in trees), max(tree.q_logits.shape[1] for tree in trees)
    padded = [tree.padded_to(count) for tree in trees]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(tree, name) for tree in padded]
        if parts[0] is None:
            return None
        if name in ("q_logits", "q_scores", "fixed"):
            parts = [torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts]
        return torch.cat(parts)

    names = ("tokens", "parents", "scores", "q_logits", "q_index", "q_scores", "drawn", "fixed")
    tree = replace(padded[0], **{name: joined(name) for name in names}, depth_bound=toy.shape.depth)
    where = torch.zeros_like(tree.tokens)
    for node in range(1, count):
        above = where.gather(1, tree.parents[:, node : node + 1])[:, 0]
        where[:, node] = torch.where(tree.is_draft[:, node], toy.vocabulary * above + 1 + tree.tokens[:, node], above)
    logits = toy.logits[0][where]
    uniforms = torch.rand(*where.shape, 3, generator=torch.Generator().manual_seed(toy.seed))
    uniforms[..., 2] = uniforms[:1, :1, 2]  # the coins of gates are no draws of the tree
    texts = TokenHistory(tree.tokens[:, :1].tolist(), markers={})
    round = RoundInput(tree, logits, toy.process(logits), False, uniforms, None, toy.process_draft, texts)
    return round, torch.tensor(chances, dtype=torch.double), where


def emissions(rule: str, toy: Grown) -> tuple[RuleInputs, Tensor, Tensor, Tensor, Tensor]:
    """RuleInputs, the distribution that a rule states [B, N, V], its cost [B, N], and what its walk does at each node:
    [B, N, V] chances to emit each token, and [B, N] to get there."""
    round, _, _ = round_of(toy)
    inputs, parsed = RuleInputs(round), parse_rule(rule)
    distribution = parsed.restricted_output(inputs)
    rows = list(range(len(round.tree.tokens)))
    budget = None if parsed.budget is None else torch.full((len(rows),), parsed.budget, dtype=torch.double)
    walk = _Walk(inputs, [(distribution, rows)], budget)
    lossy = walk.lossy()
    tree = inputs.tree
    p = VocabRows.every(inputs).log_p.view_as(round.logits).double().exp()
    stated = torch.where(lossy[..., None], output_probs(distribution, inputs), p)
    chance = torch.where(inputs.at_parents(lossy), walk.r_draft, walk.p_draft).double().masked_fill(~tree.is_draft, 0.0)
    emits = torch.zeros_like(stated)
    for node in range(tree.tokens.shape[1]):
        end = torch.full_like(tree.parents[:, :1], node)
        weights = walk._rest(end, lossy.gather(1, end)).weights().double()
        left = (1.0 - inputs.sum_children(chance)[:, node, None]).clamp_min(0.0)
        emits[:, node] = left * weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    batch, drafts = tree.is_draft.nonzero(as_tuple=True)
    emits.index_put_((batch, tree.parents[batch, drafts], tree.tokens[batch, drafts]), chance[batch, drafts], True)
    reach = torch.ones_like(chance)
    for node in range(1, tree.tokens.shape[1]):
        reach[:, node] = reach.gather(1, tree.parents[:, node : node + 1])[:, 0] * chance[:, node]
    cost = torch.zeros_like(chance) if walk.cost is None else walk.cost.masked_fill(~lossy, 0.0)
    return inputs, stated, cost, emits, reach


def shape(*sizes: Any) -> TreeShape:
    return TreeShape(*sizes)


TOYS = {
    "three tokens": Grown(3, shape(3, 2, 6)),
    "four": Grown(4, shape(2, 3, 6), seed=1),
    "six, cold": Grown(6, shape(2, 2, 5), temperature=0.5, seed=2),
    "five, hot": Grown(5, shape(2, 3, 6), temperature=1.5, seed=3),
    "reduced": Grown(6, shape(3, 2, 6), reduced=True, seed=4),
    "top-k": Grown(5, shape(3, 2, 6), keep=3, seed=5),
    "top-p, cold": Grown(5, shape(3, 2, 6), temperature=0.7, top_p=0.9, seed=6),
    "stops early": Grown(4, shape(3, 2, 6, 0.4), seed=7),
    "few nodes": Grown(4, shape(3, 3, 4), seed=8),
    "chains": Grown(4, shape(3, 1, 4), seed=9),
    "reduced chains": Grown(6, shape(3, 1, 4), reduced=True, seed=15),
    "reduced top-k": Grown(6, shape(3, 2, 6), keep=2, reduced=True, seed=10),
    "meddling": Grown(4, shape(2, 3, 6), meddles=True, seed=11),
    "meddling, deep": Grown(3, shape(3, 2, 6), meddles=True, seed=12),
    "meddling below a sure root": Grown(4, shape(2, 3, 6), meddles=True, sure=True, seed=13),
    "sure root": Grown(5, shape(2, 3, 6), sure=True, seed=14),
    "beyond a context": Grown(4, shape(3, 2, 6), known=1, seed=16),
    "drawn chain": Grown(4, shape(3, 1, 4), draws=Draws.CHAIN, seed=17),
    "drawn chain, reduced top-k": Grown(6, shape(3, 2, 6), keep=3, reduced=True, draws=Draws.CHAIN, seed=18),
    "drawn chain that stops": Grown(4, shape(3, 2, 6, 0.15), temperature=0.7, draws=Draws.CHAIN, seed=19),
    "drawn chain beyond a context": Grown(4, shape(3, 1, 4), draws=Draws.CHAIN, known=1, seed=20),
}


@pytest.mark.parametrize("name", TOYS)
def test_no_draw_shifts_what_a_context_emits(name: str) -> None:
    """Averaged over the draws, each context that is reached emits by the distribution that the rule states there.

    The contexts of all trees are grouped by their text and their distribution. A distribution that depended on a draw
    below the context, or a test with another q than the draw's, would make the average differ.
    """
    toy = TOYS[name]
    round, probability, where = round_of(toy)
    assert abs(float(probability.sum()) - 1) < 1e-5 and (round.tree.drawn is None) == (toy.draws is Draws.CHAIN)
    assert len(probability) > 1, "several trees may be drawn"
    for rule in RULES:
        inputs, distribution, cost, emits, reach = emissions(rule, toy)
        assert torch.allclose(distribution.sum(-1), torch.ones(()).double(), atol=1e-5)
        p = VocabRows.every(inputs).p.view_as(distribution).double()
        kl = torch.where(distribution > 0, distribution * (distribution / p).log(), 0.0).sum(-1)
        inner = inputs.tree.has_children
        torch.testing.assert_close(cost[inner], kl[inner].clamp_min(0.0), atol=2e-5, rtol=1e-4, msg=f"{name} {rule}")
        seen: dict[Any, list[Any]] = defaultdict(lambda: [0.0, 0.0, None])
        for row, node in inner.nonzero().tolist():
            r, weight = distribution[row, node].numpy(), float(probability[row] * reach[row, node])
            group = seen[int(where[row, node]), tuple(np.round(r, 4))]
            group[0] += weight
            group[1] += weight * emits[row, node].numpy()
            group[2] = r
        for (context, _), (weight, emitted, r) in seen.items():
            if weight > 1e-9:
                np.testing.assert_allclose(emitted / weight, r, atol=3e-4, err_msg=f"{name} {rule} {context}")


@pytest.mark.parametrize("name", TOYS)
def test_block_verification_of_trees_has_the_targets_distribution_and_accepts_more(name: str) -> None:
    """Averaged over the draws, a round's tokens, and those that follow it, have the target's joint distribution."""
    toy = TOYS[name]
    round, probability, where = round_of(toy)
    inputs, _, _, emits, reach = emissions("exact", toy)
    p, every = toy.process(toy.logits[0]).double().softmax(-1).numpy(), range(toy.vocabulary)

    @cache
    def target(context: int, tokens: int) -> np.ndarray:
        """[V**tokens] joint distribution of the next tokens."""
        if not tokens:
            return np.ones(1)
        below = toy.vocabulary * context + 1
        return np.concatenate([p[context, y] * target(below + y, tokens - 1) for y in every])

    def emitted(row: int, node: int, tokens: int) -> np.ndarray:
        """[V**tokens] the same of what is emitted at and after a node that is reached."""
        drafts = inputs.tree.is_child[row, node].nonzero()[:, 0].tolist()
        children = {int(inputs.tree.tokens[row, draft]): draft for draft in drafts}
        below, after = toy.vocabulary * int(where[row, node]) + 1, tokens - 1
        then = [emitted(row, children[y], after) if y in children else target(below + y, after) for y in every]
        return np.concatenate([float(chance) * each for chance, each in zip(emits[row, node], then, strict=True)])

    tokens = toy.shape.depth + 1
    found = sum(float(weight) * emitted(row, 0, tokens) for row, weight in enumerate(probability))
    np.testing.assert_allclose(found, target(0, tokens), atol=1e-5)
    one_by_one = torch.ones_like(reach)
    for node in range(1, reach.shape[1]):
        above = inputs.tree.parents[:, node : node + 1]
        one_by_one[:, node] = one_by_one.gather(1, above)[:, 0] * inputs.accept_prob[:, node]
    accepted, fewer = ((each * inputs.tree.is_draft).sum(1) @ probability for each in (reach, one_by_one))
    assert accepted > fewer - 1e-5
    assert accepted > fewer + 1e-4 or not (inputs.is_drawn & inputs.at_parents(inputs.is_drawn)).any()


def node_of(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, the distribution q of a drawn child, and the fixed candidates, of 5 tokens; q is 0 at the latter."""
    generator = np.random.default_rng(seed)
    p, q = softmax(generator.normal(size=(2, 5)) * 1.5, axis=-1)
    fixed = np.arange(5) < seed % 3
    q = np.where(fixed, 0.0, q) if seed % 4 else np.zeros(5)
    return p, q / max(q.sum(), 1e-300), fixed if fixed.any() or q.any() else np.arange(5) < 1


def best_of(objective: Any, start: np.ndarray, limits: list[tuple[float, float]]) -> np.ndarray:
    whole = {"type": "eq", "fun": lambda r: r.sum() - 1}
    return minimize(
        lambda r: -objective(r), start, bounds=limits, constraints=whole, options={"maxiter": 500, "ftol": 1e-12}
    ).x


@pytest.mark.parametrize("seed", range(12))
def test_the_distributions_of_a_node_with_a_drawn_child_are_the_best(seed: int) -> None:
    """`tilted` accepts most for its nats, an open gate of `fuzzy` spends least of all that always accept."""
    p, q, fixed = node_of(seed)
    as_tensor = lambda x: torch.from_numpy(np.ascontiguousarray(x))[None]  # noqa: E731
    gain, price = np.where(np.arange(5) == 4, 0.0, 1.0), (0.05, 0.3, 0.7, 1.0, 4.0)[seed % 5]

    def net(r: np.ndarray) -> float:
        drafted = np.where(fixed, r, np.minimum(r, q))
        return float((gain * drafted).sum() - price * rel_entr(r, p).sum())

    log_q = np.where(fixed, np.inf, np.log(np.maximum(q, 0), where=q > 0, out=np.full(5, -np.inf)))
    r = clipped_distribution(as_tensor(np.log(p)), as_tensor(log_q), as_tensor(gain / price))[0].exp().numpy()
    assert abs(r.sum() - 1) < 1e-9
    others = np.random.default_rng(seed).dirichlet(np.ones(5), 300)
    near = 0.97 * r + 0.03 * others
    assert net(r) >= max(net(best_of(net, p, [(1e-9, 1.0)] * 5)), *map(net, others), *map(net, near)) - 1e-7
    if fixed.any():
        r = least_divergent(as_tensor(p), as_tensor(q), as_tensor(fixed))[0].numpy()
        assert (r[~fixed] <= q[~fixed] + 1e-9).all() and abs(r.sum() - 1) < 1e-9
        spent = lambda r: -float(rel_entr(r, p).sum())  # noqa: E731
        limits = [(1e-12, 1.0 if inside else max(most, 1e-12)) for inside, most in zip(fixed, q)]
        assert spent(r) >= spent(best_of(spent, r, limits)) - 1e-6
