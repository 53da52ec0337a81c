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
from fsd_infer.rules.contexts import Contexts
from fsd_infer.rules.gates import check_gate, divergence_gate
from fsd_infer.rules.laws import Law
from fsd_infer.rules.parameters import parameter

LEAST_PRICE = 1e-3
FIRST_PRICE = 2.0  # of a learned price, before anything is spent
RARE = 100.0  # the floor of a learned price: drafts that a hot sample is this much less likely to take than the best
HEAT = 0.3  # of a learned price
LIKELY = 16  # tokens that a sample is drawn from; leaving the others out allows less, never more
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

    Without a price the rule learns one: it spends at most what the target's own samples would. At each emitted token
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
        heat: with a learned price, see above; 0.3 allows about 0.04 nats per token of a chat and 0.015 of a sum.

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

    def prices(self, at: Contexts) -> Tensor | float:
        """Of every row of the batch [B, 1], or one for all."""
        if self.price is not None:
            return self.price
        overspent = at.overspent
        if overspent is None:
            return FIRST_PRICE
        return (FIRST_PRICE + overspent).clamp_min(LEAST_PRICE)[:, None].to(wide(at.tree.tokens.device))

    def allowance(self, scores: Tensor, greedy: bool) -> Tensor | None:
        heat = self.learned_heat
        return None if heat is None else sampling_cost(scores, heat, greedy)

    def law(self, at: Contexts) -> Law:
        if self.price == math.inf:
            return Law.target(at)
        if at.sampled:
            prices = self.prices(at)
            prices = prices if isinstance(prices, float) else prices[at.rows].float()
            law = Law.dense(at, clipped(at.log_p, at.q_scores.log_softmax(-1), self._wins(at) / prices))
        else:
            law = Law.tilted(at, at.of_children(at.once_per_round(self, lambda: self._bonus(at))))
        return law if self.gate is None else law.where(divergence_gate(at, self.divergence, self.gate))

    def _bonus(self, at: Contexts) -> Tensor:
        """[B, N] v(c)/price of every node."""
        price, tree, dtype = self.prices(at), at.tree, wide(at.tree.tokens.device)
        regret, floor = at.node_regret.to(dtype), self.least_share
        favoured = at.is_draft & (regret <= (-math.log(floor) if floor else torch.finfo(dtype).max))
        novel = ~at.node_known(self.novel) if self.novel else torch.ones_like(favoured)
        favoured = favoured & novel
        if at.greedy:
            settled = ~novel & at.is_draft & (regret == 0)  # a copy that the target makes: so it has no siblings
            alone = torch.zeros_like(settled).scatter_reduce_(1, tree.parents, settled, "amax").gather(1, tree.parents)
            value = best_path(tree.ancestors, novel.to(dtype) - price * regret, favoured & ~alone | settled)
        else:
            log_p = at.node_log_p.to(dtype)
            mass = torch.zeros_like(regret).scatter_add_(1, tree.parents, log_p.exp().masked_fill(~favoured, 0.0))
            value = price * log_mean_exp(tree.ancestors, log_p + 1 / price, favoured, 1.0 - mass)
        return ((1 + value) / price).masked_fill(~favoured, 0.0)

    def _wins(self, at: Contexts) -> Tensor:
        """[R, V] drafts that each token is worth as the draft of a sampled chain: 1 or 0."""
        wins = torch.ones_like(at.log_p)
        if self.least_share:
            wins.masked_fill_(at.log_p < at.log_p_max[:, None] + math.log(self.least_share), 0.0)
        return wins.masked_fill_(at.known_tokens(self.novel), 0.0) if self.novel else wins

    def tilt(self, greedy: bool) -> float:
        return (GREEDY_SHARPNESS if greedy else 1.0) / (FIRST_PRICE if self.price is None else self.price)

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


_STEPS = 24


def clipped(log_p: Tensor, log_q: Tensor, gain: Tensor) -> Tensor:
    """ln r [R, V] of r = clip(q, p/Z, p·e^gain/Z), Z such that r adds up to 1: maximises Σ gain·min(r, q) - KL(r || p).

    Newton's method within a bracket on the sum, which is piecewise linear in 1/Z and rises with it. The number of
    steps is fixed, so that nothing waits for a device; what is left of an error is scaled away.

    Args:
        log_p, log_q: [R, V] ln p and ln q, -inf where they are 0.
        gain: [R, V], at least 0.
    """
    low, high = -gain.amax(-1, keepdim=True), torch.zeros_like(gain[:, :1])  # ln(1/Z) lies between
    log_a = high
    for _ in range(_STEPS):
        law, total, slope = _clip(log_p, log_q, gain, log_a)
        low, high = torch.where(total < 1, log_a, low), torch.where(total >= 1, log_a, high)
        newton = log_a + ((1 - total + slope).clamp_min(0.0) / slope).log()
        inside = (newton >= low) & (newton <= high)
        log_a = torch.where(inside, newton, (low + high) / 2)
    law, total, _ = _clip(log_p, log_q, gain, log_a)
    return law - total.log()


def _clip(log_p: Tensor, log_q: Tensor, gain: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ln of clip(q, a·p, a·p·e^gain) [R, V]; its sum [R, 1], and the part of that which is proportional to a."""
    least = log_p + log_a
    law = log_q.clamp(least, least + gain)
    r = law.exp()
    return law, r.sum(-1, keepdim=True), r.masked_fill(law == log_q, 0.0).sum(-1, keepdim=True)
