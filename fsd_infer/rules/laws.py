"""Laws: the distributions r from which rules emit the next token, at R contexts.

A rule says what r is; the walk (:mod:`fsd_infer.rules._walk`) draws from it, computes what it costs, and keeps budgets.
Costs are KL(r || p) in nats with p the processed target. At temperature 0 r and p are one-hot and the KL is 0 or
infinite; what is charged there is the greedy regret ``score(y*) - score(y)`` with y* the target's likeliest token and y
the emitted one, the limit of temperature times KL as the temperature falls to 0 (without processors that change scores,
ln p(y*) - ln p(y) under the raw target). Every cost is known before the token is drawn, so by the chain rule the
expected sum over a sequence is KL(output || target).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsd_infer.errors import FsdError
from fsd_infer.rules.contexts import Contexts


@dataclass(frozen=True)
class Acceptance:
    """How a sampled draft x is tested, for rules that were published with a test of their own.

    Unless a law brings one, x ~ q is accepted with probability min(1, r(x)/q(x)), else y is drawn from (r - q)+: no
    test of that law accepts more.

    Attributes:
        chance: [R] probability that x is accepted.
        rest: [R, V] weights of what is drawn otherwise, of any positive total. May contain x.
    """

    chance: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Law:
    """What is emitted at R contexts. Made by one of the constructors.

    Attributes:
        applies: [R] bool; elsewhere, and where what is left of a budget does not pay for it, the law is the target's.
        bonus: see :meth:`tilted`.
        log_r: see :meth:`dense`.
        acceptance: of a sampled draft under ``log_r``.
        closed_acceptance: of a sampled draft where the law is the target's.
    """

    applies: Tensor
    bonus: Tensor | float | None = None
    log_r: Tensor | None = None
    acceptance: Acceptance | None = None
    closed_acceptance: Acceptance | None = None

    @classmethod
    def target(cls, at: Contexts, acceptance: Acceptance | None = None) -> Law:
        """r = p; nothing is spent. ``acceptance``: of sampled drafts, if not the usual test."""
        return cls(torch.zeros_like(at.rows, dtype=torch.bool), closed_acceptance=acceptance)

    @classmethod
    def tilted(cls, at: Contexts, bonus: Tensor | float) -> Law:
        """r(y) ∝ p(y)·e^bonus(y), the bonus of tokens that are no child being 0; at temperature 0 argmax ln p + bonus.

        Args:
            at: contexts whose children were not sampled.
            bonus: [R, N] nats, at least 0 or -inf, of the nodes that are children of the context (others are not
                read), or a number for all children. ``inf`` restricts p to the children that have it. ``-inf``:
                r(y) = p(y), and the others share what is left; at temperature 0 nothing else is emitted where y is the
                likeliest.

        Raises:
            FsdError: the children were sampled, and a law must not depend on what was drawn.
        """
        if at.sampled:
            raise FsdError("these drafts were sampled, so no law may depend on which they are: use Law.dense.")
        if isinstance(bonus, Tensor):
            return cls(((bonus > 0) & at.children).any(-1), bonus=bonus)
        return cls(at.has_children, bonus=bonus)

    @classmethod
    def dense(cls, at: Contexts, log_r: Tensor, acceptance: Acceptance | None = None) -> Law:
        """Any r, where q is known; at temperature 0 the token is argmax log_r.

        Args:
            at: any contexts.
            log_r: [R, V] ln r up to a constant.
            acceptance: of sampled drafts, if not the usual test. That its law is r is then up to the rule.
        """
        return cls(at.has_q, log_r=log_r, acceptance=acceptance)

    @classmethod
    def passing(cls, at: Contexts, cutoff: Tensor | float) -> Law:
        """The exact rule, but a draft passes in any case if ln p of its token is ``cutoff`` [R] or more, and finite.

        On a tree: p restricted to the children that pass; the target's law where none does. A sampled draft x passes or
        is tested against p: r = q where tokens pass, else min(p, q); what is missing is drawn from (p - q)+.
        """
        limit = cutoff[:, None] if isinstance(cutoff, Tensor) else cutoff
        if at.sampled:
            passes = (at.log_p >= limit) & (at.p > 0)
            return cls.keeping(at, torch.where(passes, at.q, torch.minimum(at.p, at.q))).where(passes.any(-1))
        if isinstance(cutoff, float) and cutoff == -math.inf:
            return cls.tilted(at, math.inf)
        return cls.tilted(at, torch.zeros_like(at.regret).masked_fill(at.child_log_p >= limit, math.inf))

    @classmethod
    def keeping(cls, at: Contexts, kept: Tensor) -> Law:
        """A sampled draft x is kept with probability kept(x)/q(x), else y is drawn from the usual residual (p - q)+.

        Args:
            at: contexts whose children were sampled.
            kept: [R, V] between min(p, q) and q.
        """
        residual = (at.p - at.q).clamp_min(0.0)
        share = (1.0 - kept.sum(-1, keepdim=True)).clamp_min(0.0) / residual.sum(-1, keepdim=True).clamp_min(1e-30)
        return cls.dense(at, (kept + share * residual).log())

    @classmethod
    def trusting(cls, at: Contexts, cutoff: Tensor | float) -> Law:
        """y ~ q, but what q gives to tokens with ln p below ``cutoff`` [R] is drawn from p: q(y) + η·p(y) where ln p(y)
        reaches it, η·p(y) elsewhere, η what q gives to the latter. At temperature 0 the drafter's token if it is above.
        """
        if isinstance(cutoff, float) and cutoff == -math.inf:
            return cls.dense(at, at.q_scores)
        limit = cutoff[:, None] if isinstance(cutoff, Tensor) else cutoff
        if at.greedy:
            choice, best = (at.scores.gather(1, x) for x in (at.q_scores.argmax(-1, True), at.likeliest[:, None]))
            refused = at.log_p_max[:, None] + choice - best < limit
            return cls.dense(at, torch.where(refused, at.scores, at.q_scores))
        below = at.log_p < limit
        from_p = at.q.masked_fill(~below, 0.0).sum(-1, keepdim=True)
        return cls.dense(at, (at.q.masked_fill(below, 0.0) + from_p * at.p).log())

    def where(self, holds: Tensor) -> Law:
        """The same law where ``holds`` [R] bool is true, and the target's elsewhere."""
        return replace(self, applies=self.applies & holds)

    def exact_where(self, at: Contexts, novel: int) -> Law:
        """The same law, but a token that would complete a known n-gram is tested exactly.

        Of a tilted law such children get the bonus -inf. A dense law does not give such a y more than p(y): what it
        would have given is drawn from p; a sampled draft is then tested against that law.

        Args:
            novel: n, see :attr:`fsd_infer.rules.base.LossyRule.novel`.
        """
        if self.bonus is not None:
            known = at.of_children(at.node_known(novel).float()) > 0
            bonus = torch.as_tensor(self.bonus, device=known.device).expand(known.shape)
            kept = bonus.masked_fill(known, -math.inf)
            return replace(self, bonus=kept, applies=self.applies & ((kept > 0) & at.children).any(-1))
        assert self.log_r is not None
        known = at.known_tokens(novel)
        if at.greedy:
            shut = known.gather(1, self.log_r.argmax(-1, keepdim=True))
            return replace(self, log_r=torch.where(shut, at.scores, self.log_r))
        r = self.log_r.softmax(-1)
        kept = torch.where(known, torch.minimum(r, at.p), r)
        law = kept + (r - kept).sum(-1, keepdim=True) * at.p
        return replace(self, log_r=law.log(), acceptance=None)

    def log_probs(self, at: Contexts) -> Tensor:
        """[R, V] ln of the distribution of the next token, where a budget allows the law; above temperature 0."""
        if self.log_r is not None:
            return torch.where(self.applies[:, None], self.log_r.log_softmax(-1), at.log_p)
        found = at.log_p.double().clone()
        if self.bonus is None:
            return found
        bonus = torch.as_tensor(self.bonus, dtype=torch.float64).expand(at.children.shape)
        for r in self.applies.nonzero()[:, 0].tolist():
            nodes = at.children[r].nonzero()[:, 0]
            law = tilt(at.child_log_p[r, nodes].tolist(), bonus[r, nodes].tolist())
            if law is not None:
                ratios = torch.full_like(found[r], law.others)
                tokens = at.tree.tokens[at.rows[r], nodes]
                found[r] += ratios.index_copy(0, tokens, torch.tensor(law.children, dtype=torch.float64))
        return found

    def closed_by(self, acceptance: Acceptance) -> Law:
        """The same law, with a test of its own of sampled drafts where the law is the target's."""
        return replace(self, closed_acceptance=acceptance)


def lift(at: Contexts, chance: Tensor) -> Tensor:
    """[R, N] the bonus under which some child is emitted with probability ``chance`` [R] instead of p(C), and r ∝ p
    among the children as well as among all other tokens.

    ``chance`` is at least :attr:`Contexts.child_mass`, in its type.
    """
    bonus = (torch.logit(chance) - torch.logit(at.child_mass)).nan_to_num(0.0, posinf=math.inf).clamp_min(0.0)
    return bonus.masked_fill(chance >= 1, math.inf)[:, None].expand(at.children.shape)


@dataclass(frozen=True, slots=True)
class Tilt:
    """r ∝ p·e^bonus at one context.

    Attributes:
        children: ln(r/p) of each child.
        others: ln(r/p) of every other token.
        cost: KL(r || p).
    """

    children: list[float]
    others: float
    cost: float


def tilt(log_p: Sequence[float], bonus: Sequence[float]) -> Tilt | None:
    """The law of children with probabilities e^log_p and these bonuses; None if it would leave nothing to emit.

    In logs and in double precision: p(C) may underflow at a low temperature where its logarithm is a fine number, and
    so may e^-bonus. Children with the bonus -inf keep p, and the rest shares what they leave.
    """
    kept = [a for a, b in zip(log_p, bonus) if b == -math.inf]
    log_free = _log_rest(kept)
    if math.inf in bonus:  # p restricted to some children
        ratio = log_free - log_sum([a for a, b in zip(log_p, bonus) if b == math.inf])
        if math.isinf(ratio) or math.isnan(ratio):
            return None
        ratios = [ratio if b == math.inf else 0.0 if b == -math.inf else -math.inf for b in bonus]
        return Tilt(ratios, -math.inf, max(0.0, math.exp(log_free) * ratio))
    log_outside = _log_rest(log_p)
    log_z = log_sum([log_outside, *(a + b for a, b in zip(log_p, bonus))])
    if log_z == -math.inf:  # nothing is left to tilt
        return None
    others = log_free - log_z
    ratios = [0.0 if b == -math.inf else b + others for b in bonus]
    cost = math.fsum(math.exp(a + x) * x for a, x in zip(log_p, ratios))
    return Tilt(
        ratios, others, max(0.0, cost + math.exp(log_outside + others) * others if log_outside > -math.inf else cost)
    )


def _log_rest(log_p: Sequence[float]) -> float:
    """ln(1 - Σ e^log_p)"""
    rest = 1.0 - math.fsum(map(math.exp, log_p))
    return math.log(rest) if rest > 0 else -math.inf


def log_sum(logs: Sequence[float]) -> float:
    """ln Σ e^x; -inf for nothing."""
    top = max(logs, default=-math.inf)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(x - top) for x in logs))


def log_excess(log_p: float, ratio: float) -> float:
    """ln (r - p)+ for ln(r/p) = ratio."""
    return log_p + ratio + math.log1p(-math.exp(-ratio)) if ratio > 0 and log_p > -math.inf else -math.inf
