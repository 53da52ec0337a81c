"""Output distributions r, from which rules emit the next token.

A rule returns r. The walk (:mod:`fsd_infer.rules.walk`) draws from it, charges its cost, and enforces budgets. The
cost is KL(r || p) in nats, with p the processed target. At temperature 0 the KL of one-hot distributions is 0 or
infinite. So the cost is the log-probability gap ``score(y*) - score(y)``, with y* the target's likeliest token and y
the emitted one. This gap is the limit of temperature times KL as the temperature falls to 0. Every cost is known before
the token is drawn. So by the chain rule the expected sum over a sequence is KL(output || target).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsd_core import functional, sampling
from fsd_core.errors import FsdError
from fsd_core.former import warn_renamed
from fsd_core.functional import wide
from fsd_infer.rules.checks import IS_NAN, described, former_order, not_bool
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.optimal import clipped_distribution, not_above_p, passing_distribution
from fsd_infer.rules.vocab_rows import VocabRows

VocabFunction = Callable[[VocabRows], Tensor]
ROUNDING = 1e-5  # error of ln p: a token whose own ln p is the cutoff must pass


@dataclass(frozen=True)
class AcceptanceTest:
    """A test of sampled drafts under p, in place of the probability min(1, p/q).

    Attributes:
        accept_prob: [B, N] of each draft.
        weight: [B, N] w from 0 to 1, 1 without a drawn child: (w·p - q)+ replaces a rejected draft; None: p does,
            without the draft.

    Raises:
        FsdError: a function as the weight or as ``residual``, which once gave what replaces a draft.
    """

    accept_prob: Tensor
    weight: Tensor | None = None
    residual: InitVar[Any] = None

    def __post_init__(self, residual: Any) -> None:
        if callable(self.weight) or callable(residual):
            raise FsdError("AcceptanceTest takes the weight w of (w·p - q)+ [B, N] now, not a function of contexts.")


@dataclass(frozen=True)
class OutputDistribution:
    """The distribution at each context of a round: p without a bias or ``log_r``. The class methods construct others.

    Attributes:
        inputs: of the round.
        applies: [B, N] bool; elsewhere, and where the remaining budget does not pay, the distribution is p.
        logit_bias: [B, N] nats added to each draft's ln p, see :meth:`biased`.
        log_r: see :meth:`dense`. Where there is a bias, too, it holds at contexts with drawn nodes below them.
        test: of sampled drafts where the distribution is p.
        in_blocks: whether sampled drafts are tested together there, see :func:`block_test`.
        is_reducible: whether ``log_r`` is linear in p where q is 0, so that one column may stand for all such tokens
            (:class:`.ReducedVocabRows`).
    """

    inputs: RuleInputs
    applies: Tensor
    logit_bias: Tensor | None = None
    log_r: VocabFunction | None = None
    test: AcceptanceTest | None = None
    is_reducible: bool = False
    in_blocks: bool = False

    @classmethod
    def target(cls, inputs: RuleInputs) -> OutputDistribution:
        """Return the distribution r = p, which costs nothing."""
        return cls(inputs, torch.zeros_like(inputs.tree.is_draft))

    @classmethod
    def lifted(
        cls, inputs: RuleInputs, lift: Tensor | Callable[[], Tensor] | None, gain: VocabFunction | float = 1.0
    ) -> OutputDistribution:
        """Return :meth:`biased`, which had this name."""
        warn_renamed("OutputDistribution.lifted", "it is now OutputDistribution.biased")
        return cls.biased(inputs, lift, gain)

    @classmethod
    def biased(
        cls, inputs: RuleInputs, logit_bias: Tensor | Callable[[], Tensor] | None, gain: VocabFunction | float = 1.0
    ) -> OutputDistribution:
        """Return r(y) ∝ p(y)·e^bias(y), with bias 0 for tokens that are not drafted; greedy: argmax ln p + bias.

        Args:
            inputs: of the round.
            logit_bias: [B, N] nats per draft, or a function that returns them: at least 0, or -inf. ``inf`` restricts p
                to the children with ``inf``. ``-inf`` keeps r(y) = p(y), and the other tokens share the remaining mass.
                At temperature 0 such a y is emitted if it is the likeliest. A sampled chain has no use for it: None
                will do.
            gain: bias of each token as a draft where drafts are drawn: contexts -> a tensor of the shape of their p, or
                a number. There the distribution must not depend on what was drawn. So drafts are tested against r =
                clip(q, p/Z, p·e^gain/Z), and fixed candidates have r = p·e^gain/Z.

        Raises FsdError for None where drafts form no sampled chain.
        """
        logit_bias = None if inputs.is_chain else logit_bias() if callable(logit_bias) else logit_bias
        if logit_bias is None and not inputs.is_chain:
            raise FsdError("OutputDistribution.biased needs a logit_bias, [B, N] nats, except for sampled chains.")
        if not inputs.sampled:
            return cls(inputs, inputs.tree.has_children, logit_bias)

        def log_r(at: VocabRows) -> Tensor:
            gains = gain(at) if callable(gain) else torch.full_like(at.log_p, gain)
            return clipped_distribution(at.log_p, at.proposal.log().masked_fill(at.fixed, math.inf), gains)

        return cls.drawn(inputs, logit_bias, log_r)

    @classmethod
    def drawn(cls, inputs: RuleInputs, logit_bias: Tensor | None, log_r: VocabFunction) -> OutputDistribution:
        """Return a dense distribution at contexts with drawn nodes below them, a biased one at the others of a tree."""
        applies = inputs.has_q
        if logit_bias is not None:
            applies = torch.where(inputs.has_drawn_below, applies, inputs.tree.has_children)
        return cls(inputs, applies, logit_bias, log_r, is_reducible=True)

    @classmethod
    def dense(cls, inputs: RuleInputs, log_r: VocabFunction) -> OutputDistribution:
        """Return the distribution r at contexts with a known q.

        A sampled draft x is accepted with probability min(1, r(x)/q(x)), else y is drawn from (r - q)+.

        Args:
            inputs: of the round.
            log_r: contexts -> [R, V] ln r up to a constant; at temperature 0 its argmax is emitted.
        """
        return cls(inputs, inputs.has_q, log_r=log_r)

    @classmethod
    def passing(
        cls, inputs: RuleInputs, cutoff: Tensor | float, raise_prob: Callable[[Tensor], Tensor] | None = None
    ) -> OutputDistribution:
        """Return the exact distribution, except that a draft passes if its ln p is finite and at least ``cutoff``.

        On a tree p is restricted to the children that pass. On a sampled chain r = q for tokens that pass and min(p, q)
        for others; the missing mass is drawn from (p - q)+. See :func:`passing_distribution` for both at once.

        Args:
            inputs: of the round.
            cutoff: [B, N] per context, or one number.
            raise_prob: maps a probability p to one of at least p. If no child passes, some child is emitted with
                probability raise_prob(p(C)), in proportion to p. A drawn draft that does not pass is accepted with
                probability min(1, raise_prob(p(x))/q(x)).
        """
        cutoff, logit_bias = _checked_cutoff(inputs, cutoff), None
        if not inputs.is_chain:
            if isinstance(cutoff, float):  # an infinite cutoff decides without ln p
                passes = inputs.log_p >= cutoff if math.isfinite(cutoff) else inputs.tree.is_draft & (cutoff < 0)
            else:
                passes = inputs.log_p >= inputs.at_parents(cutoff - ROUNDING)
            logit_bias = torch.zeros_like(inputs.logprob_gap)
            if raise_prob is not None:  # the bias that gives the children raise_prob(p(C)) together
                mass = inputs.draft_mass
                raised = raise_prob(mass).clamp(max=1.0)
                ratio = (torch.logit(raised) - torch.logit(mass)).nan_to_num(0.0, posinf=math.inf).clamp_min(0.0)
                ratio = ratio.masked_fill(raised >= 1, math.inf).masked_fill(inputs.any_child(passes), 0.0)
                logit_bias = inputs.at_parents(ratio)
            logit_bias = logit_bias.masked_fill(passes, math.inf)
        if not inputs.sampled:
            return cls(inputs, inputs.tree.has_children, logit_bias)

        def log_r(at: VocabRows) -> Tensor:
            passes = (at.log_p >= _limit(at, cutoff)) & (at.p > 0)
            return passing_distribution(at.p, at.proposal, at.fixed, passes, raise_prob or (lambda p: p)).log()

        output = cls.drawn(inputs, logit_bias, log_r)
        if raise_prob is not None:
            return output
        return output.where(~inputs.has_drawn_below | (inputs.log_p_max >= cutoff - ROUNDING))

    @classmethod
    def trusting(cls, inputs: RuleInputs, cutoff: Tensor | float) -> OutputDistribution:
        """Return r = q + η·p for tokens with ln p of at least ``cutoff`` [B, N], and η·p for others.

        η is the mass that q gives to the other tokens. At temperature 0 the drafter's token is emitted if its ln p
        reaches the cutoff, else the target's.
        """
        cutoff = _checked_cutoff(inputs, cutoff)

        def log_r(at: VocabRows) -> Tensor:
            if isinstance(cutoff, float) and cutoff == -math.inf:
                return at.q_scores
            limit = _limit(at, cutoff)
            if inputs.greedy:
                choice = at.scores.gather(1, at.q_scores.argmax(-1, True)) - at.scores.amax(-1, True)
                refused = choice + at.of(inputs.log_p_max)[:, None] < limit
                return torch.where(refused, at.scores, at.q_scores)
            below = at.log_p < limit
            from_p = at.q.masked_fill(~below, 0.0).sum(-1, keepdim=True)
            return (at.q.masked_fill(below, 0.0) + from_p * at.p).log()

        return cls(inputs, inputs.has_q, log_r=log_r, is_reducible=True)

    def where(self, holds: Tensor | VocabFunction) -> OutputDistribution:
        """Return the distribution restricted to contexts where ``holds``, with p elsewhere.

        Args:
            holds: [B, N] bool; or a function from all contexts to [R] bool or to one bool, not called for a lone root.

        Raises:
            FsdError: the distribution has its arguments in their former order, or ``holds`` is anything else.
        """
        if not isinstance(self.inputs, RuleInputs):
            raise former_order(self)
        if callable(holds):
            if self.applies.shape[1] == 1:  # nothing was drafted: there may be no row of q to read
                return self
            self.inputs.compares = True
            holds = holds(VocabRows.every(self.inputs))
            holds = torch.full_like(self.applies, holds) if isinstance(holds, bool) else holds
            if isinstance(holds, Tensor) and holds.shape == (self.applies.numel(),):
                holds = holds.view_as(self.applies)
        shape = self.applies.shape
        if not isinstance(holds, Tensor) or holds.dtype != torch.bool or holds.dim() and holds.shape != shape:
            raise not_bool("where() takes", holds, shape)
        return replace(self, applies=self.applies & holds)

    def without_copies(self, n: int, *former: int) -> OutputDistribution:
        """Return the distribution with an exact test of tokens that repeat an n-gram of the texts.

        Such drafts get the bias -inf. A dense distribution gives such a y at most p(y); the excess is drawn from p.
        """
        if former:  # the inputs came first
            warn_renamed("OutputDistribution.without_copies(inputs, n)", "leave inputs out", 3)
            (n,) = former
        dense, inputs, logit_bias = self.log_r, self.inputs, self.logit_bias
        if logit_bias is not None:
            logit_bias = logit_bias.masked_fill(inputs.repeats_ngram(n), -math.inf)
        if dense is None:
            return replace(self, logit_bias=logit_bias)

        def log_r(at: VocabRows) -> Tensor:
            repeats, log_r = at.repeating_tokens(n), dense(at)
            if inputs.greedy:
                return torch.where(repeats.gather(1, log_r.argmax(-1, keepdim=True)), at.scores, log_r)
            return not_above_p(log_r, at.p, repeats)

        return replace(self, logit_bias=logit_bias, log_r=log_r)

    def tested(self) -> OutputDistribution:
        """Return the distribution with the test that ``in_blocks`` stands for where drafts are sampled."""
        return replace(self, test=block_test(self.inputs)) if self.in_blocks else self

    @property
    def is_exact(self) -> bool:
        """Whether all rows have the distribution p, and sampled drafts, if there are any, are tested in blocks."""
        is_p = self.logit_bias is None and self.log_r is None and self.test is None
        return is_p and (self.in_blocks or not self.inputs.sampled)

    @property
    def dense_at(self) -> Tensor | None:
        """[B, N] bool; contexts where :attr:`log_r` is the distribution, if there is one; None: all that have a q."""
        return None if self.logit_bias is None else self.inputs.has_drawn_below


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
    weight = sampling.drawn_weights((log_p - log_q).exp(), tree.parents, drawn, tree.max_depth)
    accept_prob = sampling.block_accept_probs(
        log_p, log_q, weight, inputs.residual_mass(weight), tree.parents, drawn, has_drawn_child, tree.max_depth
    )
    of_end = weight.masked_fill(~has_drawn_child, 1.0).float()  # elsewhere p, to which w·p is in proportion
    return AcceptanceTest(accept_prob, of_end)


def _checked_cutoff(inputs: RuleInputs, cutoff: Tensor | float) -> Tensor | float:
    """Return a cutoff as [B, N] or as a float. Raises FsdError for a tensor of another shape, NaN and no number."""
    if isinstance(cutoff, Real) and not math.isnan(cutoff):
        return float(cutoff)
    if not isinstance(cutoff, Tensor) or cutoff.shape != inputs.tree.tokens.shape:
        shape = tuple(inputs.tree.tokens.shape)
        raise FsdError(f"a rule's cutoff is {described(cutoff)}: give a number, or ln p per context, {shape}.")
    if inputs.checks:
        inputs.noted.append((IS_NAN.format("cutoff"), cutoff.isnan() & inputs.tree.has_children))
    return cutoff


def _limit(at: VocabRows, cutoff: Tensor | float) -> Tensor | float:
    """[R, 1] the least ln p that reaches a cutoff."""
    return at.of(cutoff - ROUNDING)[:, None] if isinstance(cutoff, Tensor) else cutoff


class BiasedOutput(NamedTuple):
    """A biased distribution in numbers, [B, N] each.

    Attributes:
        applies: contexts where it differs from p.
        r: probability of each draft.
        cost: nats at each context.
    """

    applies: Tensor
    r: Tensor
    cost: Tensor


def biased(inputs: RuleInputs, logit_bias: Tensor, applies: Tensor) -> BiasedOutput:
    """Compute the distribution r ∝ p·e^bias, see :meth:`OutputDistribution.biased`.

    Args:
        inputs: of the round.
        logit_bias: [B, N] nats per draft; inf restricts p to such children, -inf keeps r = p.
        applies: [B, N] bool; contexts that may have the distribution.
    """
    if not inputs.greedy:
        return BiasedOutput(*biased_sampled(logit_bias, inputs, applies))
    return _biased_greedy(inputs, *_allowed(logit_bias, inputs, applies))


def _allowed(logit_bias: Tensor, inputs: RuleInputs, applies: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bias without what the processed target forbids, and where it favours a child."""
    logit_bias = logit_bias.masked_fill(inputs.logprob_gap == math.inf, 0.0)
    return logit_bias, applies & inputs.any_child(logit_bias > 0)


def _biased_greedy(inputs: RuleInputs, logit_bias: Tensor, applies: Tensor) -> BiasedOutput:
    """:func:`biased` at temperature 0: the child with the largest ln p + bias, if that exceeds the target's choice."""
    logprob_gap, dtype = inputs.logprob_gap, wide(logit_bias.device)
    applies = applies & ~inputs.any_child((logit_bias == -math.inf) & inputs.accept_prob)
    value = inputs.over_children(logit_bias - logprob_gap, -math.inf)  # over the target's own choice, [B, N, N]
    best = value.amax(-1, keepdim=True)
    # ties: the least gap, then the smallest token, as an argmax over the vocabulary resolves them
    order = -logprob_gap.to(dtype) - 1e-12 * inputs.tree.tokens
    child, wins = order[:, None].masked_fill(value < best, -math.inf).argmax(-1), best[..., 0] > 0
    r = torch.where(inputs.at_parents(wins), inputs.nodes == inputs.at_parents(child), inputs.accept_prob)
    cost = logprob_gap.gather(1, child).masked_fill(~wins, 0.0).to(dtype)
    return BiasedOutput(applies, r, cost)


@functional.replaceable
def biased_sampled(logit_bias: Tensor, inputs: RuleInputs, applies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`biased` above temperature 0: the fields of its result.

    Works with logarithms in the device's widest type: p(C) and e^-bias may underflow at a low temperature.
    """
    dtype, inf = wide(logit_bias.device), math.inf
    logit_bias, applies = _allowed(logit_bias, inputs, applies)
    logit_bias, log_p = logit_bias.to(dtype), inputs.log_p.to(dtype)
    keeps_p = logit_bias == -inf
    restricted = inputs.any_child(logit_bias == inf)  # contexts where p is restricted to such children
    # ln of the unnormalised mass: of drafts, of the tokens that are not drafted, and of all that do not keep p
    log_r = log_p + torch.where(inputs.at_parents(restricted), torch.where(logit_bias == inf, 0.0, -inf), logit_bias)
    drafted = inputs.over_children(log_r, -inf).logsumexp(-1)
    undrafted = (1.0 - inputs.draft_mass).clamp_min(0.0).log().masked_fill(restricted, -inf)
    left = (1.0 - inputs.sum_children(log_p.exp().masked_fill(~keeps_p, 0.0))).clamp_min(0.0).log()
    log_scale = left - torch.logaddexp(drafted, undrafted)  # ln(r/p) of the tokens that are not drafted
    log_r = torch.where(keeps_p, log_p, log_r + inputs.at_parents(log_scale))
    r = log_r.exp()
    cost = ((undrafted + log_scale).exp() * log_scale).masked_fill(undrafted == -inf, 0.0)
    cost = (cost + inputs.sum_children((r * (log_r - log_p)).masked_fill(r == 0, 0.0))).clamp_min(0.0)
    return applies & log_scale.isfinite(), r, cost
