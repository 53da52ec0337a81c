"""Exact speculative decoding: the output's law is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.rules.base import RULES, Rule
from fsd_infer.rules.contexts import Contexts
from fsd_infer.rules.laws import Acceptance, Law
from fsd_infer.rules.parameters import parameter


@RULES.register("exact")
@dataclass(frozen=True)
class Exact(Rule):
    """Lossless. On a deterministic tree y ~ p and y goes down if it is a child, which no rule with law p betters; a
    sampled draft x is accepted with probability min(1, p(x)/q(x)), else the residual (p - q)+ is drawn from.

    Args:
        block: sampled chains are tested as a whole instead (block verification, arXiv:2403.10444): the output's law is
            the same, and in expectation no fewer drafts are accepted. Asks for p and q at all nodes of the chain.
    """

    block: bool = parameter(False)

    def law(self, at: Contexts) -> Law:
        if not (self.block and at.sampled):
            return Law.target(at)
        kept, chance = at.once_per_round(self, lambda: _block(at.whole))
        rest = (kept[at.rows, at.nodes, None] * at.p - at.q).clamp_min(0.0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, at.p)  # only where the draft is accepted
        return Law.target(at, Acceptance(chance[at.rows, at.nodes], rest))


def _block(whole: Contexts) -> tuple[Tensor, Tensor]:
    """Block verification of sampled chains, node i holding the i-th draft.

    The accepted prefix is the longest one whose own test succeeds. The tests are independent; that of prefix i succeeds
    with probability h(i) = s(i)/(s(i) + 1 - w(i)), where w(i) = min(1, w(i-1)·p/q of draft i), w(0) = 1, and
    s(i) = Σ (w(i)·p - q)+ after it; h = w at the chain's end. So the walk goes on from node i with the probability that
    a longer prefix succeeds, given that prefix i or a longer one does.

    Returns:
        w: [B, N]
        chance: [B, N] that the draft below each node is accepted, once the node was.
    """
    batch, nodes = whole.tree.tokens.shape
    p, q = whole.p.view(batch, nodes, -1), whole.q.view(batch, nodes, -1)
    draft = whole.draft.view(batch, nodes, 1)
    ratio = (p.gather(-1, draft) / q.gather(-1, draft)).squeeze(-1)
    inner = whole.has_q.view(batch, nodes)
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(1, nodes):
        w.append((w[-1] * ratio[:, i - 1]).clamp_max(1.0))
    weight = torch.stack(w, 1)
    surplus = (weight[..., None] * p - q).clamp_min(0.0).sum(-1)
    succeeds = torch.where(inner & (weight < 1), surplus / (surplus + 1 - weight), weight)  # 1 where w = 1
    fails = 1 - succeeds
    reached = 1 - fails.flip(1).cumprod(1).flip(1)  # [B, N] some prefix of i drafts or more succeeds
    below = torch.cat([reached[:, 1:], torch.zeros_like(reached[:, :1])], 1)
    # the empty prefix always succeeds, and w(0) = 1 says so
    return weight, (below / reached.clamp_min(1e-30)).clamp_max(1.0)
