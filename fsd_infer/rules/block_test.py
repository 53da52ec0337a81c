"""The test of drawn drafts under the exact rule: block verification."""

from __future__ import annotations

import torch
from torch import Tensor

from fsd_core import sampling
from fsd_core.functional import wide
from fsd_infer.rules.distributions import AcceptanceTest
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.vocab_rows import VocabRows


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
    tree, drawn, has_drawn_child = inputs.tree, inputs.is_drawn, inputs.has_drawn_child
    log_p, log_q = (each.to(wide(drawn.device)) for each in (inputs.log_p, inputs.log_q))
    p, q = log_p.exp(), log_q.exp()
    weight = sampling.drawn_weights((log_p - log_q).exp(), tree.parents, drawn, tree.max_depth)
    residual = inputs.residual_mass(weight)
    at_draws = residual / (residual + 1 - weight).clamp_min(sampling.TINY)
    ends_here = torch.where(has_drawn_child & (weight < 1), at_draws, weight)
    goes_on = sampling.descent_probs(ends_here, tree.parents, drawn, tree.max_depth)  # given that the walk is here
    rest = (inputs.at_parents(weight) * p - q).clamp_min(0.0) / inputs.at_parents(residual).clamp_min(sampling.TINY)
    fixed = torch.where(inputs.at_parents(has_drawn_child), (1 - goes_on) * rest.clamp_max(1.0), p)
    of_end = weight.masked_fill(~has_drawn_child, 1.0).float()  # elsewhere p, to which w·p is in proportion
    return AcceptanceTest(torch.where(drawn, goes_on, fixed), lambda at: _residual(at, of_end))


def _residual(at: VocabRows, weight: Tensor) -> Tensor:
    """Return (w·p - q)+, [R, V]."""
    return (at.of(weight)[:, None] * at.p - at.proposal).clamp_min(0.0)
