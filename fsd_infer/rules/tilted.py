"""The optimal lossy rule: of all laws that cost as much, the one under which most drafts are accepted.

A nat of divergence is worth ``price`` accepted drafts. p is known at every node before anything is emitted, so the most
that accepted drafts - price · KL(law || p) can reach in expectation from a node on, and the law that reaches it, have a
closed form. Derivations: docs/optimal-rule.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.transfer import wide
from fsd_infer.divergence import divergence
from fsd_infer.rules.base import MOST_NOVEL, RULES, LossyRule
from fsd_infer.rules.evidence import Contexts, Evidence
from fsd_infer.rules.gates import check_gate, divergence_gate
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter

LEAST_PRICE = 1e-3
GREEDY_SHARPNESS = 2.0  # at temperature 0 drafts are accepted about as under a draw from a law tilted so much more


@RULES.register("tilted")
@dataclass(frozen=True)
class Tilted(LossyRule):
    """r(y) ∝ p(y)·e^(v(y)/price), v(y) the accepted drafts that y is worth: no rule accepts more for its divergence.
    Exact at price = inf.

    On a tree v(c) = 1 + V(c) for a child c and 0 for every other token. With the children C of a node n,
    V(n) = price · ln(1 - p(C) + Σ_C p·e^(v/price)), and 0 at leaves; at temperature 0
    V(n) = max(0, max_C v(c) - price · regret(c)). On a sampled chain r = clip(q, p/Z, p·e^(1/price)/Z), and drafts are
    tested against r. A draft that is no novel n-gram counts as not drafted: nothing beyond it is looked at, unless, at
    temperature 0, it is what the target would say. Needs no q on trees. As the price falls to 0, p given that the walk
    takes one of the tree's deepest paths.

    Args:
        price: accepted drafts that a nat is worth, 0.001 or more: rounding would decide at lower ones.
        floor: drafts below this share of the likeliest token's probability count as not drafted: nothing favours them.
        gate: tilt only where ``divergence`` of target and drafter (raw) is at most this. What lies ahead is valued as
            if all gates were open. None: everywhere, also where no q is known.
        divergence: a name of :data:`fsd_infer.divergence.DIVERGENCES`.

    Raises:
        UnknownNameError: unknown divergence.
        FsdError: a number out of range.
    """

    price: float = parameter(2.0, low=LEAST_PRICE, infinite=True)
    floor: float = parameter(0.25, low=0, high=1)
    gate: float | None = parameter(None, low=0, infinite=True)
    divergence: str = "js"
    novel: int = parameter(3, low=0, high=MOST_NOVEL, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divergence", divergence(self.divergence).name)
        check_gate(self.name, "gate", self.divergence, self.gate)

    def law(self, evidence: Evidence) -> Law:
        if self.price == math.inf:
            return Law.target(evidence)
        law = Law.lifted(evidence, lambda: self._lift(evidence), self._gain)
        if self.gate is None:
            return law
        return law.where(evidence.has_q).where(divergence_gate(evidence, self.divergence, self.gate))

    def _lift(self, evidence: Evidence) -> Tensor:
        """[B, N] v(c)/price of every draft."""
        price, tree = self.price, evidence.tree
        regret = evidence.regret.to(wide(tree.tokens.device))
        novel = ~evidence.known(self.novel) if self.novel else evidence.is_draft
        favoured = novel & (regret <= (-math.log(self.floor) if self.floor else torch.finfo(regret.dtype).max))
        if evidence.greedy:
            copied = ~novel & (regret == 0)  # by the target itself: such a draft has no siblings
            open = favoured & ~evidence.above(evidence.some(copied)) | copied
            value = best_path(tree.ancestors, novel.to(regret.dtype) - price * regret, open)
        else:
            log_p = evidence.log_p.to(regret.dtype)
            mass = evidence.total(log_p.exp().masked_fill(~favoured, 0.0))
            value = price * log_mean_exp(tree.ancestors, log_p + 1 / price, favoured, 1.0 - mass)
        return ((1 + value) / price).masked_fill(~favoured, 0.0)

    def _gain(self, at: Contexts) -> Tensor:
        """[R, V] the same of each token as the draft of a sampled chain, which is worth 1 or 0."""
        gain = torch.full_like(at.log_p, 1 / self.price)
        if self.floor:
            gain.masked_fill_(at.log_p < at.of(at.evidence.log_p_max)[:, None] + math.log(self.floor), 0.0)
        return gain.masked_fill_(at.known_tokens(self.novel), 0.0) if self.novel else gain

    def tilt(self, greedy: bool) -> float:
        return (GREEDY_SHARPNESS if greedy else 1.0) / self.price

    def describe(self) -> dict[str, object]:
        gated = {} if self.gate is None else divergence(self.divergence).describe()
        return {**super().describe(), **gated, "price_unit": "accepted drafts per nat"}


def _sums_down(ancestors: Tensor, weights: Tensor, open: Tensor) -> Tensor:
    """[B, N, N] at [n, m] the sum of ``weights`` [B, N] on the path from n (left out) down to m.

    -inf where m is neither n nor below it, or where a node on the way is not in ``open`` [B, N].
    """
    path = ancestors.to(weights.dtype)
    sums = (path @ weights.masked_fill(~open, 0.0)[..., None]).squeeze(-1)
    closed = (path @ (~open).to(weights.dtype)[..., None]).squeeze(-1)
    reached = ancestors.transpose(1, 2) & (closed[:, :, None] == closed[:, None])
    return (sums[:, None] - sums[:, :, None]).masked_fill(~reached, -math.inf)


def best_path(ancestors: Tensor, gains: Tensor, open: Tensor) -> Tensor:
    """[B, N] V(n) = max(0, max over children c in ``open`` of gains(c) + V(c)), at all nodes at once.

    That is the largest sum of gains [B, N] on any way down from n: shortest paths, of which trees have one per pair.
    """
    return _sums_down(ancestors, gains, open).amax(-1)


def log_mean_exp(ancestors: Tensor, logs: Tensor, open: Tensor, rest: Tensor) -> Tensor:
    """[B, N] U(n) = ln(rest(n) + Σ over children c in ``open`` of e^(logs(c) + U(c))), at all nodes at once.

    e^U is linear in the children's, so it is the sum over n and all nodes m below it of rest(m) times e to the sum of
    ``logs`` on the way to m. With ``logs`` = ln p(c) + 1/λ and ``rest`` the chance that exact decoding goes no further
    than m, it is the mean of e^(accepted drafts/λ) under exact decoding from n on.

    Args:
        ancestors: [B, N, N] of a :class:`DraftTree`.
        logs, open: [B, N]; what is not open is not looked at, and nothing below it either.
        rest: [B, N]; below 0 counts as 0.
    """
    return (_sums_down(ancestors, logs, open) + rest.clamp_min(0.0).log()[:, None]).logsumexp(-1)
