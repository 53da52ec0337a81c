"""Exact speculative decoding: the output's distribution is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.rules.base import RULES, Rule
from fsd_infer.rules.distributions import AcceptanceTest, OutputDistribution
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.vocab_rows import VocabRows
from fsd_infer.trees.tree import Draws


@RULES.register("exact")
@dataclass(frozen=True)
class Exact(Rule):
    """Lossless: the output has the target's distribution.

    On a deterministic tree draw y ~ p and accept the child y, if there is one. No rule with distribution p accepts
    more. A drawn draft x is accepted with probability min(1, p(x)/q(x)); otherwise draw from the residual (p - q)+, and
    accept another child if the draw is one (the mixed scheme, arXiv:2502.18779).

    Args:
        block: draft chains that are drawn from q above temperature 0, and test them as a whole (block verification,
            arXiv:2403.10444). In expectation no fewer drafts are accepted than draft by draft. Needs p and q at all
            nodes of the chain.
        draw: from temperature 0.5 on, let trees have drawn nodes (:mod:`fsd_infer.drafters.drawing`). The distribution
            is the same; more drafts are accepted.
    """

    block: bool = parameter(False)
    draw: bool = parameter(True)

    @property
    def draws(self) -> Draws:
        return Draws.CHAIN if self.block else super().draws

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if not (self.block and inputs.sampled):
            return OutputDistribution.target(inputs)
        weight, accept_prob = _verify_block(inputs)
        test = AcceptanceTest(
            inputs.above(accept_prob), lambda at: (at.of(weight)[:, None] * at.p - at.q).clamp_min(0.0)
        )
        return OutputDistribution.target(inputs, test)


def _verify_block(inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """Block verification of sampled chains; node i is the i-th draft.

    The accepted prefix is the longest one whose own test succeeds. The tests are independent. Let w(0) = 1 and
    w(i) = min(1, w(i-1)·p/q of draft i). Let s(i) = Σ (w(i)·p - q)+ after draft i. Prefix i succeeds with probability
    h(i) = s(i)/(s(i) + 1 - w(i)); at the chain's end h = w. So the walk continues from node i with the probability that
    a longer prefix succeeds, given that prefix i or a longer one does.

    Returns:
        w: [B, N].
        accept_prob: [B, N] of the draft below each node, given that the node is accepted.
    """
    batch, nodes = inputs.tree.tokens.shape
    at = VocabRows.every(inputs)
    p, q = at.p.view(batch, nodes, -1), at.q.view(batch, nodes, -1)
    ratio, inner = (inputs.log_p - inputs.log_q).exp(), inputs.tree.inner
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(1, nodes):
        w.append((w[-1] * ratio[:, i]).clamp_max(1.0))
    weight = torch.stack(w, 1)
    surplus = (weight[..., None] * p - q).clamp_min(0.0).sum(-1)
    succeeds = torch.where(inner & (weight < 1), surplus / (surplus + 1 - weight), weight)  # 1 where w = 1
    fails = 1 - succeeds
    reached = 1 - fails.flip(1).cumprod(1).flip(1)  # [B, N] a prefix of at least i drafts succeeds
    below = torch.cat([reached[:, 1:], torch.zeros_like(reached[:, :1])], 1)
    # the empty prefix always succeeds, and w(0) = 1 says so
    return weight, (below / reached.clamp_min(1e-30)).clamp_max(1.0)
