"""Laws: the distributions r from which rules emit the next token.

A rule says what r is; the walk (:mod:`fsd_infer.rules._walk`) draws from it, computes what it costs, and keeps budgets.
Costs are KL(r || p) in nats with p the processed target. At temperature 0 r and p are one-hot and the KL is 0 or
infinite; what is charged there is the greedy regret ``score(y*) - score(y)`` with y* the target's likeliest token and y
the emitted one, the limit of temperature times KL as the temperature falls to 0 (without processors that change scores,
ln p(y*) - ln p(y) under the raw target). Every cost is known before the token is drawn, so by the chain rule the
expected sum over a sequence is KL(output || target).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fsd_infer.device.transfer import wide
from fsd_infer.rules.clipping import clipped
from fsd_infer.rules.evidence import Contexts, Evidence

AtContexts = Callable[[Contexts], Tensor]
ROUNDING = 1e-5  # of ln p, so that a token is not shut out by a cutoff that is its own ln p


class Test(NamedTuple):
    """How sampled drafts are tested where the law is p, if not with the chance min(1, p/q).

    ``chance``: [B, N] that each draft is accepted. ``rest``: contexts -> [R, V] weights, of any positive total, of what
    is drawn otherwise; None: p without the draft.
    """

    chance: Tensor
    rest: AtContexts | None = None


@dataclass(frozen=True)
class Law:
    """What is emitted at the contexts of a round. Made by one of the constructors.

    Attributes:
        applies: [B, N] bool; at other contexts, and where what is left of a budget does not pay, the law is p.
        lift: [B, N] nats by which each draft is favoured, see :meth:`lifted`.
        log_r: see :meth:`dense`.
        gate: contexts -> [R] bool that must hold, too. On a CPU it is asked only where the walk comes, as is ``log_r``.
        test: of sampled drafts where the law is p.
    """

    applies: Tensor
    lift: Tensor | None = None
    log_r: AtContexts | None = None
    gate: AtContexts | None = None
    test: Test | None = None

    @property
    def is_target(self) -> bool:
        """Is r = p at all contexts."""
        return self.lift is None and self.log_r is None

    @classmethod
    def target(cls, evidence: Evidence, test: Test | None = None) -> Law:
        """r = p; nothing is spent."""
        return cls(torch.zeros_like(evidence.is_draft), test=test)

    @classmethod
    def lifted(cls, evidence: Evidence, lift: Tensor | Callable[[], Tensor], gain: AtContexts | float = 1.0) -> Law:
        """r(y) ∝ p(y)·e^lift(y), the lift of tokens that are not drafted being 0; at temperature 0 argmax ln p + lift.

        Args:
            evidence: of the round.
            lift: [B, N] nats of each draft, or what makes them; at least 0 or -inf. ``inf`` restricts p to the children
                that have it. ``-inf``: r(y) = p(y), and the others share what is left; at temperature 0 nothing else is
                emitted where y is the likeliest.
            gain: [R, V] lift of each token as the draft of a sampled chain, whose law must not depend on the draft:
                r = clip(q, p/Z, p·e^gain/Z), the law closest to q, against which the draft is tested.
        """
        if not evidence.sampled:
            return cls(evidence.inner, lift() if callable(lift) else lift)

        def log_r(at: Contexts) -> Tensor:
            gains = gain(at) if callable(gain) else torch.full_like(at.log_p, gain)
            return clipped(at.log_p, at.q_scores.log_softmax(-1), gains)

        return cls.dense(evidence, log_r)

    @classmethod
    def dense(cls, evidence: Evidence, log_r: AtContexts) -> Law:
        """Any r, where q is known: contexts -> [R, V] ln r up to a constant; at temperature 0 the token is its argmax.

        A sampled draft x is accepted with probability min(1, r(x)/q(x)), else y is drawn from (r - q)+.
        """
        return cls(evidence.has_q, log_r=log_r)

    @classmethod
    def passing(
        cls, evidence: Evidence, cutoff: Tensor | float, chance: Callable[[Tensor], Tensor] | None = None
    ) -> Law:
        """The exact rule, but a draft passes in any case if ln p of its token is ``cutoff`` or more, and finite.

        On a tree: p restricted to the children that pass. A sampled draft x passes or is tested: r = q where tokens
        pass, else min(p, q); what is missing is drawn from (p - q)+.

        Args:
            evidence: of the round.
            cutoff: [B, N] at each context, or one for all.
            chance: of a probability p, at least p. Where no child passes some child is emitted with chance(p(C)), in
                proportion to p; a sampled draft that does not pass is accepted with min(1, chance(p(x))/q(x)).
        """
        if not evidence.sampled:
            if isinstance(cutoff, float):  # with no need of ln p where it decides nothing
                passes = evidence.log_p >= cutoff if math.isfinite(cutoff) else evidence.is_draft & (cutoff < 0)
            else:
                passes = evidence.log_p >= evidence.above(cutoff - ROUNDING)
            lift = torch.zeros_like(evidence.regret)
            if chance is not None:  # the lift under which the children together have it
                mass = evidence.draft_mass
                raised = chance(mass).clamp(max=1.0)
                ratio = (torch.logit(raised) - torch.logit(mass)).nan_to_num(0.0, posinf=math.inf).clamp_min(0.0)
                ratio = ratio.masked_fill(raised >= 1, math.inf).masked_fill(evidence.some(passes), 0.0)
                lift = evidence.above(ratio)
            return cls(evidence.inner, lift.masked_fill(passes, math.inf))

        def log_r(at: Contexts) -> Tensor:
            passes = (at.log_p >= _limit(at, cutoff)) & (at.p > 0)
            kept = torch.where(passes, at.q, torch.minimum(at.q, at.p if chance is None else chance(at.p)))
            residual = (at.p - at.q).clamp_min(0.0)
            share = (1.0 - kept.sum(-1, keepdim=True)).clamp_min(0.0) / residual.sum(-1, keepdim=True).clamp_min(1e-30)
            return (kept + share * residual).log()

        law = cls.dense(evidence, log_r)
        return law if chance is not None else law.where(evidence.log_p_max >= cutoff - ROUNDING)

    @classmethod
    def trusting(cls, evidence: Evidence, cutoff: Tensor | float) -> Law:
        """y ~ q, but what q gives to tokens with ln p below ``cutoff`` [B, N] is drawn from p: q(y) + η·p(y) where ln p
        reaches it, η·p(y) elsewhere, η what q gives to the latter. At temperature 0 the drafter's token if it is above.
        """

        def log_r(at: Contexts) -> Tensor:
            if isinstance(cutoff, float) and cutoff == -math.inf:
                return at.q_scores
            limit = _limit(at, cutoff)
            if evidence.greedy:
                choice = at.scores.gather(1, at.q_scores.argmax(-1, True)) - at.scores.amax(-1, True)
                refused = choice + at.of(evidence.log_p_max)[:, None] < limit
                return torch.where(refused, at.scores, at.q_scores)
            below = at.log_p < limit
            from_p = at.q.masked_fill(~below, 0.0).sum(-1, keepdim=True)
            return (at.q.masked_fill(below, 0.0) + from_p * at.p).log()

        return cls.dense(evidence, log_r)

    def where(self, holds: Tensor | AtContexts) -> Law:
        """The same law where it holds, and p elsewhere.

        Args:
            holds: [B, N] bool at each context; or contexts -> [R] bool, for what takes work over the vocabulary.
        """
        if isinstance(holds, Tensor):
            return replace(self, applies=self.applies & holds)
        first = self.gate
        return replace(self, gate=holds if first is None else lambda at: first(at) & holds(at))

    def novel(self, evidence: Evidence, n: int) -> Law:
        """The same law, but a token that would complete a known n-gram is tested exactly.

        Such drafts get the lift -inf. A dense law does not give such a y more than p(y): what it would have given is
        drawn from p.
        """
        dense = self.log_r
        if self.lift is not None:
            return replace(self, lift=self.lift.masked_fill(evidence.known(n), -math.inf))
        if dense is None:
            return self

        def log_r(at: Contexts) -> Tensor:
            known, log_r = at.known_tokens(n), dense(at)
            if evidence.greedy:
                return torch.where(known.gather(1, log_r.argmax(-1, keepdim=True)), at.scores, log_r)
            r = log_r.softmax(-1)
            kept = torch.where(known, torch.minimum(r, at.p), r)
            return (kept + (r - kept).sum(-1, keepdim=True) * at.p).log()

        return replace(self, log_r=log_r)

    def log_probs(self, evidence: Evidence) -> Tensor:
        """[B, N, V] ln of the distribution of the next token, where a budget allows the law; above temperature 0."""
        at, applies, tree = evidence.whole, self.applies, evidence.tree
        if self.gate is not None:
            applies = applies & self.gate(at).view_as(applies)
        found = log_p = at.log_p.unflatten(0, applies.shape).double()
        if self.log_r is not None:
            found = self.log_r(at).log_softmax(-1).view_as(log_p).double()
        elif self.lift is not None:
            applies, chance, _, others = lifted(evidence, self.lift, applies)
            found = log_p + others[..., None]
            rows, drafts = evidence.is_draft.nonzero(as_tuple=True)
            found[rows, tree.parents[rows, drafts], tree.tokens[rows, drafts]] = chance[rows, drafts].log()
        return torch.where(applies[..., None], found, log_p)


def _limit(at: Contexts, cutoff: Tensor | float) -> Tensor | float:
    """[R, 1] ln p from which tokens reach a cutoff."""
    return at.of(cutoff - ROUNDING)[:, None] if isinstance(cutoff, Tensor) else cutoff


class Odds(NamedTuple):
    """A lifted law in numbers, [B, N] each: the contexts where it differs from p; r of each draft; at each context its
    cost, and ln(r/p) of every token that is not drafted (at temperature 0 of no meaning)."""

    applies: Tensor
    chance: Tensor
    cost: Tensor
    others: Tensor


def lifted(evidence: Evidence, lift: Tensor, applies: Tensor) -> Odds:
    """The law r ∝ p·e^lift at the contexts that ``applies`` names, see :meth:`Law.lifted`.

    In logs and in the device's widest type: p(C) may underflow at a low temperature where its logarithm is a fine
    number, and so may e^-lift.
    """
    dtype, inf, regret = wide(lift.device), math.inf, evidence.regret
    lift = lift.masked_fill(regret == inf, 0.0)  # what the processed target forbids is never emitted
    held = lift == -inf
    applies = applies & evidence.some(lift > 0)
    if evidence.greedy:
        applies = applies & ~evidence.some(held & evidence.chance)
        value = evidence.of_children(lift - regret, -inf)
        best = value.amax(-1, keepdim=True)
        # of equals the least regret, then the smallest token, as an argmax over the vocabulary would have it
        order = -regret.to(dtype) - 1e-12 * evidence.tree.tokens
        child, won = order[:, None].masked_fill(value < best, -inf).argmax(-1), best[..., 0] > 0
        chance = torch.where(evidence.above(won), evidence.nodes == evidence.above(child), evidence.chance)
        cost = regret.gather(1, child).masked_fill(~won, 0.0).to(dtype)
        return Odds(applies, chance, cost, cost)
    lift, log_p = lift.to(dtype), evidence.log_p.to(dtype)
    free = (1.0 - evidence.total(log_p.exp().masked_fill(~held, 0.0))).clamp_min(0.0).log()
    forced = evidence.some(lift == inf)  # p is restricted to these
    outside = (1.0 - evidence.draft_mass).clamp_min(0.0).log().masked_fill(forced, -inf)
    log_r = log_p + torch.where(evidence.above(forced), torch.where(lift == inf, 0.0, -inf), lift)
    inside = evidence.of_children(log_r, -inf).logsumexp(-1)
    others = free - torch.logaddexp(inside, outside)  # what scales all weights: children that are held leave less
    log_r = torch.where(held, log_p, log_r + evidence.above(others))
    r, cost = log_r.exp(), ((outside + others).exp() * others).masked_fill(outside == -inf, 0.0)
    cost = (cost + evidence.total((r * (log_r - log_p)).masked_fill(r == 0, 0.0))).clamp_min(0.0)
    return Odds(applies & others.isfinite(), r, cost, others.masked_fill(forced, -inf))
