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

from fsd_infer.cpu import ops
from fsd_infer.device.transfer import wide
from fsd_infer.divergence import divergence
from fsd_infer.errors import FsdError
from fsd_infer.rules.base import MOST_NOVEL, RULES, LossyRule
from fsd_infer.rules.evidence import Contexts, Evidence
from fsd_infer.rules.gates import check_gate, divergence_gate
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter

LEAST_PRICE = 1e-3
FIRST_PRICE = 2.0  # of a learned price, before anything is spent
HEAT = 0.3  # of a learned price
RARE = 100.0  # the floor of a learned price: drafts that a hot sample takes this much less often than the best token
LIKELY = 16  # tokens that a hot sample is drawn from; leaving the others out allows less, never more
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

    Without a price the rule learns one: it spends about what the target's own samples would. At each emitted token
    a sample of p^(1/(1 + heat)), at temperature 0 of softmax(logits/heat), would cost some nats on average. What
    was spent beyond their sum so far raises the price, and what was left over lowers it (drift plus penalty: Neely,
    2010), so spending follows that sum within a few nats. Sure texts allow little, loose ones more.

    Args:
        price: accepted drafts that a nat is worth, 0.001 or more: rounding would decide at lower ones. None: learned.
        floor: drafts below this share of the likeliest token's probability count as not drafted: nothing favours them.
            None: 0.25, or with a learned price what a sample at that heat takes 100 times less often than the best.
        gate: tilt only where ``divergence`` of target and drafter (raw) is at most this. What lies ahead is valued as
            if all gates were open. None: everywhere, also where no q is known.
        divergence: a name of :data:`fsd_infer.divergence.DIVERGENCES`.
        heat: with a learned price, see above; by default 0.3, which allows about 0.04 nats per token of a chat and
            0.015 of a worked sum.

    Raises:
        UnknownNameError: unknown divergence.
        FsdError: a number out of range, or heat with a price.
    """

    price: float | None = parameter(None, low=LEAST_PRICE, infinite=True)
    floor: float | None = parameter(None, low=0, high=1)
    gate: float | None = parameter(None, low=0, infinite=True)
    divergence: str = "js"
    heat: float | None = parameter(None, above=0, keyword=True)
    novel: int = parameter(3, low=0, high=MOST_NOVEL, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divergence", divergence(self.divergence).name)
        check_gate(self.name, "gate", self.divergence, self.gate)
        if self.price is not None and self.heat is not None:
            raise FsdError("rule 'tilted': heat is for a learned price: leave out price or heat.")

    @property
    def learned_heat(self) -> float | None:
        """The heat by which the price is learned; None where a price is given."""
        return (HEAT if self.heat is None else self.heat) if self.price is None else None

    @property
    def least_share(self) -> float:
        """The floor, given or by default."""
        if self.floor is not None:
            return self.floor
        heat = self.learned_heat
        return 0.25 if heat is None else RARE**-heat

    @property
    def first_price(self) -> float:
        """The price, given or of a text's first round."""
        return FIRST_PRICE if self.price is None else self.price

    def prices(self, evidence: Evidence) -> Tensor:
        """[B, 1] of every row."""
        overspent = evidence.round.overspent
        first = evidence.tree.tokens[:, :1].to(wide(evidence.tree.tokens.device)) * 0 + self.first_price
        if self.price is not None or overspent is None:
            return first
        return (first + overspent[:, None]).clamp_min(LEAST_PRICE)

    def allowance(self, scores: Tensor, greedy: bool) -> Tensor | None:
        heat = self.learned_heat
        return None if heat is None else sampling_cost(scores, heat, greedy)

    def law(self, evidence: Evidence) -> Law:
        if self.price == math.inf:
            return Law.target(evidence)
        law = Law.lifted(evidence, lambda: self._lift(evidence), self._gain)
        if self.gate is None:
            return law
        return law.where(evidence.has_q).where(divergence_gate(evidence, self.divergence, self.gate))

    def _lift(self, evidence: Evidence) -> Tensor:
        """[B, N] v(c)/price of every draft."""
        price, tree, floor = self.prices(evidence), evidence.tree, self.least_share
        regret = evidence.regret.to(price.dtype)
        novel = ~evidence.known(self.novel) if self.novel else evidence.is_draft
        favoured = novel & (regret <= (-math.log(floor) if floor else torch.finfo(regret.dtype).max))
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
        gain = (1 / self.prices(at.evidence))[at.rows].float().repeat(1, at.log_p.shape[1])
        if self.least_share:
            gain.masked_fill_(at.log_p < at.of(at.evidence.log_p_max)[:, None] + math.log(self.least_share), 0.0)
        return gain.masked_fill_(at.known_tokens(self.novel), 0.0) if self.novel else gain

    def tilt(self, greedy: bool) -> float:
        return (GREEDY_SHARPNESS if greedy else 1.0) / self.first_price

    def describe(self) -> dict[str, object]:
        gated = {} if self.gate is None else divergence(self.divergence).describe()
        return {**super().describe(), **gated, "price_unit": "accepted drafts per nat"}


def sampling_cost(scores: Tensor, heat: float, greedy: bool) -> Tensor:
    """[..., V] scores -> [...] nats that a hot sample costs on average.

    At temperature 0 its mean regret, E[max(scores) - scores] under softmax(scores/heat). Above, the divergence
    KL(p^(1/(1+heat)) || p) from p = softmax(scores). Both are of the ``LIKELY`` likeliest tokens.
    """
    top, _ = ops.likeliest(scores, min(LIKELY, scores.shape[-1]))
    regret = top[..., :1] - top
    if greedy:
        return ((-regret / heat).softmax(-1) * regret.nan_to_num(posinf=0.0)).sum(-1)
    log_p, log_hot = (-regret).log_softmax(-1), (-regret / (1 + heat)).log_softmax(-1)
    return (log_hot.exp() * (log_hot - log_p).nan_to_num()).sum(-1).clamp_min(0.0)


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
