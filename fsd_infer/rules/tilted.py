"""The optimal lossy rule: of all distributions with the same cost, the one that accepts most drafts.

A nat of divergence is worth ``kl_coef`` accepted drafts. p is known at every node before a token is emitted. Hence the
distribution that maximises E[accepted drafts] - kl_coef · KL(distribution || p) from a node on has a closed form, which
docs/optimal-rule.md derives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_core import functional
from fsd_core.divergence import divergence
from fsd_core.errors import FsdError
from fsd_core.functional import wide
from fsd_infer.rules.base import MAX_TOKENS, RULES, LossyRule
from fsd_infer.rules.distributions import OutputDistribution
from fsd_infer.rules.fuzzy import check_gate, divergence_gate
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.vocab_rows import VocabRows

MIN_KL_COEF = 1e-3
KL_COEF, DEVIATION_COST, EXACT_START = 2.0, 1.0, 48  # the defaults
INITIAL_KL_COEF = 2.0  # an adaptive KL coefficient before any spending
# min_p of an adaptive coefficient: the samples that it matches take such a token this many times less often
RARE = 100.0
LIKELY = 16  # the samples to match are of this many tokens; fewer tokens allow less, never more
GREEDY_SHARPNESS = 2.0  # greedy acceptance resembles draws from a distribution with so many times the draft bonus


@RULES.register("tilted")
@dataclass(frozen=True)
class Tilted(LossyRule):
    """r(y) ∝ p(y)·e^(v(y)/λ), where v(y) is the number of accepted drafts y is worth. Exact at λ = inf.

    λ is ``kl_coef``. No rule accepts more drafts for its divergence. On a tree v(c) = 1 + V(c) for a child c and 0 for
    every other token. For a node n with children C, V(n) = λ · ln(1 - p(C) + Σ_C p·e^(v/λ)); V is 0 at leaves. At
    temperature 0, V(n) = max(0, max_C v(c) - λ · gap(c) - cost · [c is not the target's choice]), with the cost
    ``deviation_cost``. On a sampled chain, drafts are tested against r = clip(q, p/Z, p·e^(1/λ)/Z). Trees
    need no q. As λ falls to 0, r becomes p conditioned on the walk taking one of the tree's deepest paths.

    A draft that completes an n-gram of ``exact_ngram_size`` tokens counts as not drafted, and so do the nodes below it.
    The exception: at temperature 0, a draft that is the target's own choice.

    At temperature 0 the harm of a deviation hardly depends on its gap, ln p(best) - ln p(draft): one of 0.1 nats turns
    a right answer wrong as often as one of 1. What it depends on is how much of the answer is still to come. So by
    default each deviation also has a cost, whatever its gap, which leaves those that win several drafts; and an
    answer's first tokens are exact.

    With a temperature t to match, λ adapts, and the rule spends about what the target's own samples would. At each
    emitted token such a sample costs some nats on average: one of p^(1/(1 + t)), at temperature 0 of softmax(logits/t).
    The sum of these costs is the KL target. Spending beyond it raises λ, and below it lowers λ (drift plus penalty:
    Neely, 2010). So spending follows the target within a few nats.

    Args:
        kl_coef: how many accepted drafts a nat is worth, at least 0.001 (rounding decides below it). None: 2, or
            adaptive if there is a temperature to match.
        min_p: drafts below this share of the likeliest token's probability count as not drafted. None: 0.25; with
            an adaptive λ, the share that the samples take 100 times less often than the likeliest token.
        gate: favour drafts only where ``divergence`` of target and drafter (raw) is at most this. V assumes open gates
            below. None: everywhere, even where no q is known.
        divergence: a name in :data:`fsd_core.divergence.DIVERGENCES`.
        match_temperature: of the samples whose cost an adaptive λ matches. 0.3 allows about 0.04 nats per token of
            chat and 0.015 of a worked sum.
        deviation_cost: accepted drafts that each deviation costs besides its gap, at temperature 0. None: 1; with a λ
            or a temperature to match, 0.
        exact_start: how many first tokens are exact. None: 48; with a λ or a temperature to match, 0.
        draw: from temperature 0.5 on, let trees have drawn nodes. Without, fewer drafts are accepted than by `exact`.

    Raises:
        UnknownNameError: unknown divergence.
        FsdError: a number out of range, or match_temperature with a kl_coef.
    """

    measured = (
        "by default 1.04 times exact's tokens per forward at 0.0 points of score (-2.2 to +2.2), with "
        "match_temperature=0.3 1.28 times at -2.2 points (-6.7 to +1.5): 135 prompts of IFEval, the built-in head, "
        "benchmarks/results/rules-ifeval-odd.json. By default on 168 made instructions 1.07 times at +1.2 points (0.0 "
        "to +3.0): rules-made-late.json. On 60 stories by TinyLlama with stories15M 1.03 times at 0.0 points (no "
        "answer lost or gained): rules-stories.json. At temperature 1 it gains nothing: rules-ifeval-odd-t1.json"
    )
    kl_coef: float | None = parameter(None, low=MIN_KL_COEF, infinite=True)
    min_p: float | None = parameter(None, low=0, high=1)
    gate: float | None = parameter(None, low=0, infinite=True)
    divergence: str = "js"
    match_temperature: float | None = parameter(None, above=0, keyword=True)
    deviation_cost: float | None = parameter(None, low=0, high=1e6, keyword=True)
    exact_ngram_size: int = parameter(3, low=0, high=MAX_TOKENS, keyword=True)
    draw: bool = parameter(True, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divergence", divergence(self.divergence).name)
        check_gate(self.name, "gate", self.divergence, self.gate)
        if self.kl_coef is not None and self.match_temperature is not None:
            raise FsdError("rule 'tilted': match_temperature adapts kl_coef: leave out one of the two.")

    @property
    def _by_default(self) -> bool:
        return self.kl_coef is None and self.match_temperature is None

    @property
    def effective_deviation_cost(self) -> float:
        """``deviation_cost``, given or by default."""
        return self.deviation_cost if self.deviation_cost is not None else DEVIATION_COST if self._by_default else 0.0

    @property
    def exact_answer_tokens(self) -> int:
        return self.exact_start if self.exact_start is not None else EXACT_START if self._by_default else 0

    @property
    def effective_min_p(self) -> float:
        """``min_p``, given or by default."""
        if self.min_p is not None:
            return self.min_p
        return 0.25 if self.match_temperature is None else RARE**-self.match_temperature

    @property
    def initial_kl_coef(self) -> float:
        """``kl_coef``, given or of a text's first round."""
        if self.kl_coef is not None:
            return self.kl_coef
        return KL_COEF if self.match_temperature is None else INITIAL_KL_COEF

    def kl_coefs(self, inputs: RuleInputs) -> Tensor:
        """[B, 1] the current ``kl_coef`` of each row."""
        roots, kl_excess = inputs.tree.tokens[:, :1], inputs.round.kl_excess
        initial = torch.full_like(roots, self.initial_kl_coef, dtype=wide(roots.device))
        if self.match_temperature is None or kl_excess is None:
            return initial
        return (initial + kl_excess[:, None]).clamp_min(MIN_KL_COEF)

    def kl_target(self, scores: Tensor, greedy: bool) -> Tensor | None:
        return None if self.match_temperature is None else sampling_cost(scores, self.match_temperature, greedy)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.kl_coef == math.inf:
            return OutputDistribution.target(inputs)
        logit_bias = None if inputs.is_chain else self._logit_bias(inputs)
        output = OutputDistribution.biased(inputs, logit_bias, self._gain)
        if self.gate is None:
            return output
        return output.where(divergence_gate(inputs, self.divergence, self.gate))

    def _logit_bias(self, inputs: RuleInputs) -> Tensor:
        """[B, N] v(c)/λ of each draft."""
        coef, min_p = self.kl_coefs(inputs), self.effective_min_p
        logprob_gap = inputs.logprob_gap.to(coef.dtype)
        is_new = ~inputs.repeats_ngram(self.exact_ngram_size) if self.exact_ngram_size else inputs.tree.is_draft
        eligible = is_new & (logprob_gap <= (-math.log(min_p) if min_p else torch.finfo(logprob_gap.dtype).max))
        cost = self.effective_deviation_cost
        return tilted_bias(logprob_gap, coef, is_new, eligible, self.lossy_at(inputs), cost, inputs)

    def _gain(self, at: VocabRows) -> Tensor:
        """[R, V] v/λ of each token as the draft of a sampled chain, which is worth 1 or 0."""
        gain = (1 / self.kl_coefs(at.inputs))[at.rows].float()
        least = at.of(at.inputs.log_p_max)[:, None] + math.log(self.effective_min_p) if self.effective_min_p else None
        eligible = at.log_p > -math.inf if least is None else at.log_p >= least
        if self.exact_ngram_size:
            eligible &= ~at.repeating_tokens(self.exact_ngram_size)
        return torch.where(eligible, gain, 0.0)

    def draft_bonus(self, greedy: bool) -> float:
        if self._by_default and not greedy:  # few deviations are made, and a tree that counts on them accepts less
            return 0.0
        return (GREEDY_SHARPNESS if greedy else 1.0) / self.initial_kl_coef

    def describe(self) -> dict[str, object]:
        gated = {} if self.gate is None else divergence(self.divergence).describe()
        return {**super().describe(), **gated, "kl_coef_unit": "accepted drafts per nat"}


def sampling_cost(scores: Tensor, temperature: float, greedy: bool) -> Tensor:
    """Return the mean cost of a sample at a temperature: [..., V] scores -> [...] nats.

    In greedy decoding that is the mean gap, E[max(scores) - scores] under softmax(scores/temperature). Else it is
    KL(p^(1/(1+temperature)) || p) with p = softmax(scores). Both use only the ``LIKELY`` likeliest tokens.
    """
    top, _ = functional.topk_logprobs(scores, min(LIKELY, scores.shape[-1]))
    logprob_gap = top[..., :1] - top
    if greedy:
        return ((-logprob_gap / temperature).softmax(-1) * logprob_gap.nan_to_num(posinf=0.0)).sum(-1)
    log_p, log_q = (-logprob_gap).log_softmax(-1), (-logprob_gap / (1 + temperature)).log_softmax(-1)
    return (log_q.exp() * (log_q - log_p).nan_to_num()).sum(-1).clamp_min(0.0)


@functional.replaceable
def tilted_bias(
    logprob_gap: Tensor,
    coef: Tensor,
    is_new: Tensor,
    eligible: Tensor,
    lossy: Tensor | None,
    deviation_cost: float,
    inputs: RuleInputs,
) -> Tensor:
    """Return v(c)/λ of each draft of a tree: [B, N].

    Args:
        logprob_gap: [B, N] in λ's type.
        coef: [B, 1] λ.
        is_new: [B, N] bool; drafts that repeat no n-gram.
        eligible: [B, N] bool; those of them that may be favoured.
        lossy: [B, N] bool; contexts where the rule may be lossy. None: all. Read at temperature 0, as the cost is.
        deviation_cost: accepted drafts that each deviation costs.
        inputs: of the round.
    """
    tree = inputs.tree
    if inputs.greedy:
        # the target's own choice, whose siblings are never taken
        repeated_choice = ~is_new & (logprob_gap == 0)
        is_open = eligible & ~inputs.at_parents(inputs.any_child(repeated_choice)) | repeated_choice
        if lossy is not None:
            is_open = is_open & (inputs.at_parents(lossy) | inputs.accept_prob)
        own_cost = torch.where(inputs.accept_prob, 0.0, deviation_cost)
        gains = is_new.to(logprob_gap.dtype) - coef * logprob_gap - own_cost
        value = best_path(tree.ancestors, gains, is_open) - own_cost
    else:
        log_p = inputs.log_p.to(logprob_gap.dtype)
        mass = inputs.sum_children(log_p.exp().masked_fill(~eligible, 0.0))
        value = coef * log_mean_exp(tree.ancestors, log_p + 1 / coef, eligible, 1.0 - mass)
    return ((1 + value).clamp_min(0.0) / coef).masked_fill(~eligible, 0.0)


def _sums_down(ancestors: Tensor, weights: Tensor, is_open: Tensor) -> Tensor:
    """[B, N, N] at [n, m] the sum of ``weights`` [B, N] on the path from n (excluded) down to m.

    -inf if m is not in the subtree of n, or if a node on the path is not in ``is_open`` [B, N].
    """
    path = ancestors.to(weights.dtype)
    sums = (path @ weights.masked_fill(~is_open, 0.0)[..., None]).squeeze(-1)
    closed = (path @ (~is_open).to(weights.dtype)[..., None]).squeeze(-1)
    reached = ancestors.transpose(1, 2) & (closed[:, :, None] == closed[:, None])
    return (sums[:, None] - sums[:, :, None]).masked_fill(~reached, -math.inf)


def best_path(ancestors: Tensor, gains: Tensor, is_open: Tensor) -> Tensor:
    """[B, N] V(n) = max(0, max over children c in ``is_open`` of gains(c) + V(c)).

    V(n) is the largest sum of gains [B, N] on a path down from n. One matrix of path sums gives it at all nodes.
    """
    return _sums_down(ancestors, gains, is_open).amax(-1)


def log_mean_exp(ancestors: Tensor, logs: Tensor, is_open: Tensor, rest: Tensor) -> Tensor:
    """[B, N] U(n) = ln(rest(n) + Σ over children c in ``is_open`` of e^(logs(c) + U(c))).

    e^U is linear in the children's e^U. So it is the sum, over n and all nodes m below n, of rest(m)·e^(path sum of
    ``logs`` to m). Take ``logs`` = ln p(c) + 1/λ, and let ``rest`` be the probability that exact decoding ends at m.
    Then e^U is the mean of e^(accepted drafts/λ) under exact decoding from n on.

    Args:
        ancestors: [B, N, N] of a :class:`DraftTree`.
        logs: [B, N].
        is_open: [B, N] bool; other nodes are ignored, with their subtrees.
        rest: [B, N]; negative values count as 0.
    """
    return (_sums_down(ancestors, logs, is_open) + rest.clamp_min(0.0).log()[:, None]).logsumexp(-1)
