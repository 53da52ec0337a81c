"""The laws from which rules emit a context's token, and how a gate switches between two of them.

Costs are KL(law || p) in nats with p the processed target. At temperature 0 both are one-hot and the KL is 0 or
infinite; what is charged there is the greedy regret ``score(y*) - score(y)`` with y* the exact rule's token and y the
emitted one, the limit of temperature times KL as the temperature falls to 0 (without processors that change scores,
ln p(y*) - ln p(y) under the raw target). Every cost is known before the token is drawn, so by the chain rule the
expected sum over a sequence is KL(output || target).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fsd_infer.divergence import divergence
from fsd_infer.errors import FsdError
from fsd_infer.rules._contexts import Contexts, Decision, draw
from fsd_infer.rules._walk import walk
from fsd_infer.rules.base import Rule, Verdict, Verification


@dataclass
class OpenLaw:
    """What happens at S contexts if their gates open.

    Attributes:
        tokens: [S] the emitted tokens.
        forced: [S] bool; the exact rule would not have let this token through.
        cost: [S] nats.
        possible: [S] bool; False where the law does not exist and the gate has to stay closed.
    """

    tokens: Tensor
    forced: Tensor
    cost: Tensor
    possible: Tensor


def target_law(at: Contexts, column: int = 0) -> Tensor:
    """y ~ p, or its argmax: [R] tokens."""
    return at.best if at.greedy else draw(at.p, at.uniform(column))


def _exact_test(at: Contexts) -> Tensor:
    """Does a sampled draft pass the speculative test u < p(x)/q(x): [R] bool, False without children."""
    p_x, q_x = (at.at_tokens(values, at.only_child) for values in (at.p, at.q))
    return (at.uniform(0) * q_x < p_x) & at.has_q


def _residual(at: Contexts) -> Tensor:
    """[R, V] weights of (p - q)+, or p where rounding left nothing."""
    weights = (at.p - at.q).clamp_min(0.0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, at.p)


def exact_law(at: Contexts) -> Tensor:
    """Exact speculative sampling: [R] tokens, of law p whether or not they are drafted.

    A deterministic tree: y ~ p. A sampled draft x: x if u < p(x)/q(x), else y ~ (p - q)+ normalised.
    """
    if not at.sampled or not (at.whole or bool(at.has_q.any())):
        return target_law(at)
    weights = torch.where(at.has_q[:, None], _residual(at), at.p)
    drawn = draw(weights, torch.where(at.has_q, at.uniform(1), at.uniform(0)))
    return torch.where(_exact_test(at), at.only_child, drawn)


def strict_closed_law(at: Contexts) -> Tensor:
    """y ~ p without regard to drafts: [R] tokens. A sampled draft leaves column 0 to the exact test."""
    return target_law(at, column=1 if at.sampled else 0)


def _regret(at: Contexts, best: Tensor, tokens: Tensor) -> Tensor:
    """score(best) - score(token): [R], at least 0, inf for a token that the processed target forbids."""
    scores = at.scores_of(torch.stack([best, tokens], dim=1))
    return (scores[:, 0] - scores[:, 1]).clamp_min(0.0)


def children_law(at: Contexts, closed: Tensor) -> OpenLaw:
    """The open gate of `fuzzy`: p restricted to the children on a tree, q (less forbidden tokens) on a sampled chain.

    A tree: y ~ p, and if it is no child, y ~ p(. | C); the law is p(. | C), the cost -ln p(C). There is no such law
    where p(C) = 0. A sampled draft x is taken unless p(x) = 0, when the exact rule rejects it: the law is
    q [p > 0] + q(p = 0) (p - q)+ / TV(p, q).

    Args:
        at: S contexts with children.
        closed: [S] what the exact law emits there.
    """
    if at.sampled:
        allowed = at.at_tokens(at.p, at.only_child) > 0
        forbidden_mass = at.q.masked_fill(at.p > 0, 0.0).sum(-1, keepdim=True)
        residual = _residual(at)
        law = at.q.masked_fill(at.p <= 0, 0.0) + forbidden_mass * residual / residual.sum(-1, keepdim=True)
        cost = divergence("kl")(at.scores.log_softmax(-1), law.log(), log_probs=True)
        # outside the support of p the law is 0, and the fp32 logarithms of p there may differ from -inf
        tokens = torch.where(allowed, at.only_child, closed)
        return OpenLaw(tokens, allowed & ~_exact_test(at), cost, torch.ones_like(allowed))
    drafted = at.among_children(closed).any(-1)
    if at.greedy:
        scores = at.scores_of(at.draft_tokens).masked_fill(~at.children, -math.inf)
        best = scores.amax(-1, keepdim=True)
        # equal scores: the smallest token, as an argmax over the vocabulary would have it
        child = at.draft_tokens.masked_fill((scores < best) | ~at.children, at.evidence.round.scores.shape[-1]).amin(-1)
        possible = best.squeeze(-1) > -math.inf
        tokens = torch.where(drafted | ~possible, closed, child)
        return OpenLaw(tokens, ~drafted, _regret(at, closed, tokens), possible)
    # in logs: p(C) may underflow at a low temperature where its logarithm is a fine number
    log_p = at.scores_of(at.draft_tokens).masked_fill(~at.children, -math.inf)
    log_mass = log_p.logsumexp(-1) - at.scores.logsumexp(-1)
    possible = log_mass > -math.inf
    child = draw(torch.where(possible[:, None], log_p, 0.0).softmax(-1), at.uniform(1))
    tokens = torch.where(drafted, closed, at.draft_tokens.gather(1, child[:, None]).squeeze(-1))
    return OpenLaw(tokens, ~drafted, (-log_mass).clamp_min(0.0), possible)


def draft_law(at: Contexts, closed: Tensor) -> OpenLaw:
    """The open gate of `fuzzy-strict` and `draft-only`: y ~ q, whatever the target thinks of it.

    A sampled draft is that draw; on a tree it is drawn here (argmax at temperature 0) and may be no child, which ends
    the round. q is the processed drafter distribution above temperature 0, raw at 0. The cost is KL(q || p).

    Args:
        at: S contexts with children and known q.
        closed: [S] what the target's law emits there.
    """
    if at.greedy:
        draft_ids = at.evidence.tree.draft_ids
        tokens = at.q_logits.argmax(-1)
        tokens = tokens if draft_ids is None else draft_ids[tokens]
        cost = _regret(at, closed, tokens)
    else:
        tokens = at.only_child if at.sampled else draw(at.q, at.uniform(0))
        cost = divergence("kl")(at.scores, at.q_scores)
    if at.sampled:
        forced = ~_exact_test(at)
    else:
        forced = (tokens != closed) | ~at.among_children(tokens).any(-1)
    return OpenLaw(tokens, forced, cost, torch.ones_like(forced))


class GatedRule(Rule):
    """Base of rules that emit from the target's law where a gate is closed and from another where it is open.

    Attributes:
        over_children: these laws are :func:`exact_law` and :func:`children_law`.
    """

    over_children: ClassVar[bool] = False

    def gate(self, at: Contexts) -> Tensor:
        """[R] bool; does the gate want to open. False where there are no children."""
        raise NotImplementedError

    def open_law(self, at: Contexts, closed: Tensor) -> OpenLaw:
        """See :func:`children_law` and :func:`draft_law`."""
        raise NotImplementedError

    def closed_law(self, at: Contexts) -> Tensor:
        return exact_law(at)

    def decide(self, at: Contexts) -> Decision:
        """Decisions at R contexts."""
        closed = self.closed_law(at)
        if at.evidence.tree.q_logits.shape[1] == 0:  # no gate opens without q
            return Decision.without_gate(closed)
        if at.whole:
            wants, law = self.gate(at), self.open_law(at, closed)
            return Decision(closed, law.tokens, wants & law.possible, law.forced, law.cost)
        index = self.gate(at).nonzero().squeeze(-1)
        if index.shape[0] == 0:
            return Decision.without_gate(closed)
        law = self.open_law(at.select(index), closed[index])
        if index.shape[0] == closed.shape[0]:
            return Decision(closed, law.tokens, law.possible, law.forced, law.cost)
        rest = Decision.without_gate(closed)
        return Decision(
            closed=closed,
            opened=closed.index_copy(0, index, law.tokens),
            opens=rest.opens.index_copy(0, index, law.possible),
            forced=rest.forced.index_copy(0, index, law.forced),
            cost=rest.cost.index_copy(0, index, law.cost),
        )

    def __call__(self, round: Verification) -> Verdict:
        return walk(round, self.decide, self.budget, gate_over_children=self.gate if self.over_children else None)


def check_number(rule: str, what: str, value: object, high: float = math.inf) -> float:
    """``value`` as a float in [0, high]. Raises FsdError otherwise (negative, NaN, no number)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FsdError(f"rule {rule!r}: {what} must be a number, not {value!r}.")
    if not 0.0 <= value <= high:  # False for NaN
        span = "at least 0" if high == math.inf else f"between 0 and {high:g}"
        raise FsdError(f"rule {rule!r}: {what} must be {span}, not {value!r}.")
    return float(value)
