"""Exact speculative decoding: the output's distribution is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.divergence import divergence
from fsd_core.tensors import wide
from fsd_infer.rules.base import RULES, Rule
from fsd_infer.rules.distributions import AcceptanceTest, OutputDistribution
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.vocab_rows import VocabRows
from fsd_infer.trees.tree import Draws

TINY = 1e-30  # in place of 0 as a divisor


@RULES.register("exact")
@dataclass(frozen=True)
class Exact(Rule):
    """Lossless: the output has the target's distribution.

    On a deterministic tree draw y ~ p and accept the child y, if there is one. No rule with distribution p accepts
    more. The drawn nodes of a tree are tested together, see :func:`block_test`.

    Args:
        block: draft chains that are drawn from q above temperature 0, and test them as a whole.
        draw: from temperature 0.5 on, let trees have drawn nodes (:mod:`fsd_infer.drafters.drawing`). The distribution
            is the same; more drafts are accepted.
    """

    block: bool = parameter(False)
    draw: bool = parameter(True)

    @property
    def draws(self) -> Draws:
        return Draws.CHAIN if self.block else super().draws

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        # a chain is drawn without ``block`` only if another row's rule asks for one; that row tests draft by draft
        together = inputs.sampled and (self.block or not inputs.is_chain)
        return OutputDistribution.target(inputs, block_test(inputs) if together else None)


def block_test(inputs: RuleInputs) -> AcceptanceTest:
    """Test drawn drafts path by path: block verification (arXiv:2403.10444), here on trees with fixed children, too.

    Draft by draft, y ~ q passes with probability min(1, p/q) and is lost where p < q, although its own drafts may be
    likelier under p than under q. So the ratios are multiplied first. Let w = 1 at roots and at fixed nodes, and
    w(y) = min(1, w(x)·p(y)/q(y)) at a drawn child y of x. The walk ends at or below y with probability w(y):

    - below y it ends with probability s of y's drawn child, 0 without one;
    - else at y, with probability h(y) = r/(r + 1 - w(y)) and r = Σ (w(y)·p - q)+; without a drawn child h = w;
    - else the walk returns to x, which decides likewise. At w = 1 it never returns.

    Where it ends, the next token is drawn from (w·p - q)+. If that is a fixed child, the walk goes on there with w = 1.
    In expectation over the draws s(y) = w(y), so a token that follows x has probability min(w·p, q) by its own draw and
    (w·p - q)+ otherwise: w·p together. No fewer drafts are accepted than draft by draft.
    """
    tree, drawn, draws = inputs.tree, inputs.is_drawn, inputs.draws
    ratio = (inputs.log_p - inputs.log_q).to(wide(drawn.device)).exp()
    weight = ones = torch.ones_like(ratio)
    for _ in range(tree.max_depth):
        weight = torch.where(drawn, (inputs.above(weight) * ratio).clamp_max(1.0), ones)
    residual = _residual(inputs, weight)
    ends = torch.where(draws & (weight < 1), residual / (residual + 1 - weight).clamp_min(TINY), weight)  # h
    within, below = ends, torch.zeros_like(ends)  # s of each node, and of its drawn child
    for _ in range(tree.max_depth):
        below = torch.zeros_like(ends).scatter_add(1, tree.parents, within.masked_fill(~drawn, 0.0))
        within = below + (1 - below) * ends
    goes_on = (below / within.clamp_min(TINY)).clamp_max(1.0)  # to the drawn child, given that the walk is here
    rest = (inputs.above(weight) * inputs.log_p.exp() - inputs.log_q.exp()).clamp_min(0.0)
    share = (rest / inputs.above(residual).clamp_min(TINY)).clamp_max(1.0)
    fixed = torch.where(inputs.above(draws), (1 - inputs.above(goes_on)) * share, inputs.log_p.to(weight.dtype).exp())
    chance = torch.where(drawn, inputs.above(goes_on), fixed)
    return AcceptanceTest(
        chance, lambda at: (at.of(weight).to(at.p.dtype)[:, None] * at.p - at.proposal).clamp_min(0.0)
    )


def _rest(at: VocabRows, weight: Tensor) -> Tensor:
    """Return (w·p - q)+, [R, V]."""
    return (at.of(weight).to(at.p.dtype)[:, None] * at.p - at.proposal).clamp_min(0.0)


def _residual(inputs: RuleInputs, weight: Tensor) -> Tensor:
    """Return Σ (w·p - q)+ at contexts with a drawn child, [B, N]. It is the total variation where w = 1."""
    tree, scores = inputs.tree, inputs.round.scores
    assert tree.q_scores is not None
    index = tree.q_index.masked_fill(~inputs.draws, -1)
    tv = functional.divergence_rows(scores, tree.q_scores, divergence("tv"), tree.draft_ids, index).to(weight.dtype)
    at = VocabRows.every(inputs)
    at = at.those(functional.selected(at.of(inputs.draws & (weight < 1))))
    if not len(at.rows):
        return tv
    weighted = _rest(at, weight).sum(-1).to(tv.dtype)
    return torch.where(weight < 1, tv.index_put((at.rows, at.nodes), weighted), tv)
