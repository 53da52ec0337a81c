"""Lossy rules of other papers and engines, each restated as a distribution on draft trees.

A draft *passes* if the rule accepts it whatever the exact test says. On a tree, p is restricted to the children that
pass. At temperature 0, p is the target's distribution at temperature 1, and the likeliest passing child is emitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_core.functional import wide
from fsd_core.sampling import TINY
from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.distributions import OutputDistribution
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import parameter
from fsd_infer.rules.tilted import best_path


@RULES.register("lenient")
@dataclass(frozen=True)
class Lenient(LossyRule):
    """Accept a draft with probability min(1, p/(lenience·q)). Exact at lenience = 1.

    No token's probability exceeds p/lenience. A rejected sampled draft is replaced by a draw from (p - q)+. On a tree,
    some child is emitted with probability min(1, p(C)/lenience). From Leviathan et al. (arXiv:2211.17192, appendix);
    DistillSpec's lossy mode (arXiv:2310.08461).

    Args:
        lenience: in (0, 1].
    """

    lenience: float = parameter(above=0, high=1)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.lenience == 1:
            return OutputDistribution.target(inputs)
        return OutputDistribution.passing(inputs, math.inf, lambda p: p / self.lenience)


@RULES.register("typical")
@dataclass(frozen=True)
class Typical(LossyRule):
    """Pass drafts with p(x) >= min(epsilon, delta·e^-H(p)), H the entropy. Exact at epsilon = delta = inf.

    A sampled draft that does not pass takes the exact test. From Medusa (arXiv:2401.10774), with its defaults. Medusa
    has no sampled drafts and is exact at temperature 0.

    Args:
        epsilon: the bound on p(x) where the target's entropy is low.
        delta: the bound relative to e^-H.
    """

    measured = (
        "with exact_ngram_size=3 1.45 times exact's tokens per forward at -5.9 points of score (-10.4 to -1.5): "
        "135 prompts of IFEval, the built-in head, benchmarks/results/rules-ifeval-odd-published.json. On 60 stories "
        "by TinyLlama with stories15M 1.87 times at -15.0 points (-28.3 to -1.7): rules-stories.json"
    )
    epsilon: float = parameter(0.09, low=0, infinite=True)
    delta: float = parameter(0.3, low=0, infinite=True)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        log_epsilon, log_delta = (math.log(x) if x > 0 else -math.inf for x in (self.epsilon, self.delta))
        return OutputDistribution.passing(inputs, (log_delta - inputs.entropy).clamp_max(log_epsilon))


@RULES.register("relaxed")
@dataclass(frozen=True)
class Relaxed(LossyRule):
    """Pass drafts among the target's k likeliest tokens with p(x) >= p_max - delta. Exact at k = 0.

    At temperature 0 it is exact at k = 1 and at delta = 0, too. A sampled draft that does not pass takes the exact
    test. From TensorRT-LLM (`relaxed_topk`, `relaxed_delta`; greedy only), with the defaults it recommends for
    reasoning.

    Args:
        k: how many of the target's likeliest tokens may pass.
        delta: the largest accepted distance from p_max, in [0, 1].
        relative: require p(x) >= delta·p_max instead.
    """

    k: int = parameter(10, low=0, high=2**31 - 1)
    delta: float = parameter(0.6, low=0, high=1)
    relative: bool = False

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.k == 0:
            return OutputDistribution.target(inputs)
        best = inputs.topk_log_p(self.k)
        p_max = best[..., 0].exp()
        near_best = (p_max * self.delta if self.relative else (p_max - self.delta).clamp_min(0.0)).log()
        return OutputDistribution.passing(inputs, torch.maximum(best[..., -1], near_best))


@RULES.register("threshold")
@dataclass(frozen=True)
class Threshold(LossyRule):
    """Pass drafts with p(x) >= single; test others exactly with p/acc in place of p. Exact at single = acc = 1.

    Where no child of a tree passes, some child is emitted with probability min(1, p(C)/acc). From SGLang
    (`--speculative-accept-threshold-single`, `-acc`). Its tree test accepts equally often but prefers earlier siblings,
    and it ignores both thresholds at temperature 0.

    Args:
        single: in [0, 1]; 1 for no such threshold.
        acc: in (0, 1].
    """

    single: float = parameter(1.0, low=0, high=1)
    acc: float = parameter(1.0, above=0, high=1)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.single == self.acc == 1:
            return OutputDistribution.target(inputs)
        cutoff = math.log(self.single) if 0 < self.single < 1 else math.inf if self.single else -math.inf
        return OutputDistribution.passing(inputs, cutoff, lambda p: p / self.acc)


@RULES.register("cascade-token")
@dataclass(frozen=True)
class CascadeToken(LossyRule):
    """With A = {x: p(x) >= (1 - alpha)·p_max}, the distribution is q + η·p on A and η·p elsewhere, η = 1 - q(A).

    Exact at alpha < 0, where A is empty. Exact at contexts without a q (n-gram lookup). At temperature 0 it emits the
    drafter's likeliest token if A holds it, else the target's. From arXiv:2405.19261 (variant "token v3"), with the
    default of github.com/chiatzenw-cur/lossy-token-eff. `fuzzy:js:inf` with min_p 1 - alpha tests drafts outside A
    exactly.

    Args:
        alpha: at most 1, where A holds every token; at 0, A holds the target's likeliest token.
    """

    alpha: float = parameter(0.3, high=1)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.alpha < 0:
            return OutputDistribution.target(inputs)
        return OutputDistribution.trusting(
            inputs, inputs.log_p_max + math.log1p(-self.alpha) if self.alpha < 1 else -math.inf
        )


@RULES.register("ensemble")
@dataclass(frozen=True)
class Ensemble(LossyRule):
    """Decode exactly from the mixture weight·p + (1 - weight)·q. Exact at weight = 1.

    Exact at contexts without a q (n-gram lookup). From transformers (`assistant_ensemble_weight`), after
    arXiv:2604.07622.

    Args:
        weight: of the target, in (0, 1].
    """

    weight: float = parameter(above=0, high=1)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.weight == 1:
            return OutputDistribution.target(inputs)
        return OutputDistribution.dense(inputs, lambda at: (self.weight * at.p + (1 - self.weight) * at.q).log())


@RULES.register("fly")
@dataclass(frozen=True)
class Fly(LossyRule):
    """Pass a mismatch where the target is unsure and agrees with the drafts that follow; temperature 0 only.

    If the target's own choice is not drafted, a draft passes under two conditions. -Σ p ln p over the target's three
    likeliest tokens is at least `entropy`, and the next window - 1 drafts below it are the target's own choices. Of
    several, the likeliest is emitted. Exact at entropy = inf, and on trees shallower than the window. From
    arXiv:2511.22972, with the defaults of its code.

    Args:
        window: how many drafts are examined, the mismatch included.
        entropy: nats.
    """

    greedy_only = True
    measured = (
        "window=3:exact_ngram_size=3 1.23 times exact's tokens per forward at -1.5 points (-5.2 to +2.2), with "
        "exact_sentence_start=5 1.14 times at +0.7 (-2.2 to +4.4), with 8 1.10 times at 0.0 (-3.0 to +3.0): 135 "
        "prompts of IFEval, the built-in head, benchmarks/results/rules-ifeval-odd-lead.json and -rivals.json. On 304 "
        "made instructions 5 lost 18 answers, gained 11 and repeated 4 points more: lead-study.json and "
        "rules-made-late.json"
    )
    window: int = parameter(6, low=1, high=1024)
    entropy: float = parameter(0.3, low=0, infinite=True)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        self.check_greedy(inputs)
        agrees = inputs.logprob_gap == 0
        run = best_path(inputs.tree.ancestors, torch.ones_like(inputs.logprob_gap), agrees)
        log_p = inputs.topk_log_p(3)
        unsure = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1) >= self.entropy
        logit_bias = torch.zeros_like(run).masked_fill(run >= self.window - 1, math.inf)
        return OutputDistribution.biased(inputs, logit_bias).where(unsure & ~inputs.any_child(agrees))


@RULES.register("asd")
@dataclass(frozen=True)
class Asd(LossyRule):
    """Pass mismatches whose logprob gap is small beside what they win, within a request's budget; temperature 0 only.

    A draft that is not the target's choice passes if max z - z(x), in logits, is at most ``gap`` times the
    drafts that it may win. These are the depth of the tree below its parent; on a chain K - i. A round passes at most
    ``mismatches`` of them, a request as many as the sum of their gaps stays within the budget. Of several, the
    likeliest is emitted. Exact where one of the three is 0. From arXiv:2608.03447, with the defaults of its code.

    Args:
        gap: logits per draft.
        mismatches: the most that pass in a round.
    """

    greedy_only = True
    measured = (
        "by default 1.24 times exact's tokens per forward at -7.4 points of score (-12.6 to -3.7): 135 prompts of "
        "IFEval, the built-in head, benchmarks/results/rules-ifeval-odd-rivals.json"
    )
    gap: float = parameter(0.25, low=0, infinite=True)
    mismatches: int = parameter(2, low=0, high=1024)
    budget: float | None = parameter(8.0, low=0, infinite=True, keyword=True)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        self.check_greedy(inputs)
        if 0 in (self.gap, self.mismatches, self.budget):  # equal logits have no gap, yet one of them is not argmax
            return OutputDistribution.target(inputs)
        tree, logprob_gap = inputs.tree, inputs.logprob_gap
        ones = torch.ones_like(logprob_gap)
        mismatch = tree.is_draft & ~inputs.accept_prob
        count = (tree.ancestors.to(ones.dtype) @ mismatch.to(ones.dtype)[..., None]).squeeze(-1)
        depth_below = best_path(tree.ancestors, ones, tree.is_draft)
        passes = (logprob_gap <= self.gap * inputs.at_parents(depth_below)) & (count <= self.mismatches)
        logit_bias = torch.zeros_like(logprob_gap).masked_fill(passes & mismatch, math.inf)
        return OutputDistribution.biased(inputs, logit_bias).where(~inputs.any_child(inputs.accept_prob))


@RULES.register("mars")
@dataclass(frozen=True)
class Mars(LossyRule):
    """Pass the target's second choice where ln p of its two likeliest tokens differs by less than ``margin``.

    Exact at margin = 0. A sampled draft that does not pass takes the exact test. From arXiv:2601.15498, which compares
    the ratio of the two logits with 0.9; a ratio depends on the logits' zero, so here the difference counts.

    Args:
        margin: nats, at temperature 0 the difference of the logits.
    """

    measured = (
        "by default 1.18 times exact's tokens per forward at -1.5 points of score (-4.4 to +1.5), 7.4 points fewer "
        "answers end: 135 prompts of IFEval, the built-in head, benchmarks/results/rules-ifeval-odd-rivals.json"
    )
    margin: float = parameter(1.0, low=0, infinite=True)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.margin == 0:
            return OutputDistribution.target(inputs)
        first, second = inputs.topk_log_p(2).unbind(-1)
        return OutputDistribution.passing(inputs, second.masked_fill(first - second >= self.margin, math.inf))


@RULES.register("cactus")
@dataclass(frozen=True)
class Cactus(LossyRule):
    """Test against h, which favours the draft: h(x) = min(1, p(x) + √(2·delta·p(x)(1-p(x)))). Exact at delta = 0.

    h scales all other tokens down. On a tree p(C) takes the place of p(x), and KL(h || p) <= ln(1 + 2·delta). At
    temperature 0 the distribution's likeliest token is emitted. From arXiv:2604.04987, which sets no default.

    Args:
        delta: nats per token, approximately.
    """

    measured = (
        "delta = 0.25 with exact_ngram_size=3 1.29 times exact's tokens per forward at -3.7 points of score "
        "(-8.9 to +1.5): 135 prompts of IFEval, the built-in head, benchmarks/results/rules-ifeval-odd-published.json"
    )
    delta: float = parameter(low=0, high=1e6)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        if self.delta == 0:
            return OutputDistribution.target(inputs)
        if inputs.is_chain:  # the replacement of a rejected draft depends on the draft
            return OutputDistribution.dense(inputs, lambda at: _averaged(at.p, at.q, self._raised(at.p)).log())
        return OutputDistribution.passing(inputs, math.inf, self._raised)

    def _raised(self, p: Tensor) -> Tensor:
        return (p + (2 * self.delta * p * (1 - p)).clamp_min(0.0).sqrt()).clamp_max(1.0)


def _averaged(p: Tensor, q: Tensor, h: Tensor) -> Tensor:
    """[R, V] the distribution of x ~ q, kept with probability min(1, h(x)/q(x)), else y ~ (h_x - q)+, normalised.

    h_x is h(x) at x and s(x)·p elsewhere, s = (1 - h)/(1 - p). If x can be rejected, (h_x - q)+ is 0 at x, so only s(x)
    matters. The tokens with s·p > q come first when sorted by q/p, and the x with s(x) > q/p when sorted by s. Sums
    over them are cumulative sums.
    """
    narrow, dtype = p.dtype, wide(p.device)
    p, q, h = (values.to(dtype) for values in (p, q, h))
    ratio = torch.where(p > 0, q / p, torch.inf)
    s = ((1 - h) / (1 - p).clamp_min(TINY)).clamp(0.0, 1.0)
    by_ratio, order = ratio.sort(-1)
    before = torch.searchsorted(by_ratio, s)  # tokens with q/p < s(x)
    total = s * _sum_of_first(p, order, before) - _sum_of_first(q, order, before)
    # total is 0 where s = 0: such a draft is never rejected
    weight = torch.where(total > 0, (q - h).clamp_min(0.0) / total.clamp_min(TINY), 0.0)
    by_s, order = s.sort(-1, descending=True)
    before = torch.searchsorted(-by_s, -ratio)  # x with s(x) > q/p
    drawn = p * _sum_of_first(weight * s, order, before) - q * _sum_of_first(weight, order, before)
    return (torch.minimum(q, h) + drawn.clamp_min(0.0)).to(narrow)


def _sum_of_first(values: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """[R, V] sums of the first ``counts`` [R, V] of ``values`` [R, V] in ``order`` [R, V]."""
    return torch.nn.functional.pad(values.gather(-1, order).cumsum(-1), (1, 0)).gather(-1, counts)
