"""Fuzzy speculative decoding: a gate opens where target and drafter are close, D(p, q) <= T. And its two controls."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fsd_core.divergence import divergence
from fsd_core.errors import FsdError
from fsd_infer.rules.base import RULES, LossyRule
from fsd_infer.rules.distributions import AcceptanceTest, OutputDistribution
from fsd_infer.rules.inputs import RuleInputs
from fsd_infer.rules.parameters import parameter


@dataclass(frozen=True)
class DivergenceGate(LossyRule):
    """A gate g = [D(p, q) <= T] at every context that has children and a known drafter distribution.

    Args:
        divergence: a name in :data:`fsd_core.divergence.DIVERGENCES`.
        threshold: T, in the divergence's unit, at most its largest value. 0 never opens a gate. inf always does, even
            where D is infinite.
        gate_on: "raw" compares softmax(logits) of both models, "processed" the distributions after the request's
            logits processors. Temperature 0 always compares raw ones, since processed ones are one-hot.
        min_p: an open gate passes no token whose probability is below this share of the likeliest token's.

    Raises:
        UnknownNameError: unknown divergence.
        FsdError: a number out of range, unknown ``gate_on``.
    """

    divergence: str = "js"
    threshold: float = parameter(0.3, low=0, infinite=True)
    gate_on: Literal["raw", "processed"] = parameter("raw", alias="gate")
    min_p: float = parameter(0.0, low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "divergence", divergence(self.divergence).name)
        check_gate(self.name, "threshold", self.divergence, self.threshold)

    def gate(self, inputs: RuleInputs) -> Tensor:
        """[B, N] bool; contexts where the gate is open, which have a known q."""
        return divergence_gate(inputs, self.divergence, self.threshold, self.gate_on == "processed")

    def cutoff(self, inputs: RuleInputs) -> Tensor | float:
        """[B, N] ln p that a token needs to pass ``min_p``."""
        return inputs.log_p_max + math.log(self.min_p) if self.min_p else -math.inf

    def describe(self) -> dict[str, object]:
        return {**super().describe(), **divergence(self.divergence).describe()}


@RULES.register("fuzzy")
@dataclass(frozen=True)
class Fuzzy(DivergenceGate):
    """The "or" rule: accept a draft if the exact rule accepts it or the gate is open. Exact at threshold = 0.

    On a deterministic tree draw y ~ p. If the gate is open and y is no child, draw y ~ p restricted to the children C.
    The distribution is then p(. | C), at the cost -ln p(C). A sampled draft is accepted where the gate is open, so the
    distribution is q there. A token that the processed target forbids is never emitted.
    """

    measured = (
        "js:0.3 with exact_ngram_size=3 1.22 times exact's tokens per forward at -3.0 points of score (-7.4 to +0.7): "
        "135 prompts of IFEval, the built-in head, benchmarks/results/rules-ifeval-odd-published.json. On 60 stories "
        "by TinyLlama with stories15M 1.66 times at -25.0 points (-40.0 to -10.0): rules-stories.json"
    )

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        return OutputDistribution.passing(inputs, self.cutoff(inputs)).where(self.gate(inputs))


@RULES.register("fuzzy-strict")
@dataclass(frozen=True)
class FuzzyStrict(DivergenceGate):
    """The rule as first published: y ~ q where the gate is open, y ~ p elsewhere. Exact at threshold = 0.

    At threshold 0 it accepts almost no sampled drafts. On a tree a y that is no child ends the round, open gate or not.
    The rule may emit tokens that the processed target forbids; their cost KL(q || p) is infinite, so a budget excludes
    them. With ``min_p``, a y ~ q below it is replaced by y ~ p.
    """

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        output = OutputDistribution.trusting(inputs, self.cutoff(inputs)).where(self.gate(inputs))
        # on a chain a closed gate draws y ~ p regardless of the draft, and accepts the draft if y is equal to it
        return replace(output, test=AcceptanceTest(inputs.log_p.exp())) if inputs.is_chain else output


@RULES.register("random")
@dataclass(frozen=True)
class RandomGate(LossyRule):
    """`fuzzy` with gates that open at random: the control for every claim about a gate. Exact at rate = 0.

    Args:
        rate: probability that a gate is open, in [0, 1].
    """

    rate: float = parameter(low=0, high=1)

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        return OutputDistribution.passing(inputs, -math.inf).where(inputs.has_q & (inputs.gate_uniform < self.rate))


@RULES.register("draft-only")
@dataclass(frozen=True)
class DraftOnly(LossyRule):
    """y ~ q at every context that has children and a known q, y ~ p elsewhere. Exact at budget = 0 only.

    Args:
    """

    def output(self, inputs: RuleInputs) -> OutputDistribution:
        return OutputDistribution.trusting(inputs, -math.inf)


def check_gate(rule: str, parameter: str, measure: str, threshold: float | None) -> None:
    """Raise FsdError for a finite threshold above the divergence's bound: percent, bits, or another divergence's."""
    most = divergence(measure).bounds[1]
    if threshold is not None and most * (1 + 1e-6) < threshold < math.inf:  # the bound may be rounded up
        raise FsdError(
            f"rule {rule!r}: {parameter} must be at most {most:.4g}, the largest {measure}, not {threshold:g}; "
            "write inf for a gate that is always open."
        )


def divergence_gate(inputs: RuleInputs, measure: str, threshold: float, processed: bool = False) -> Tensor:
    """[B, N] bool; D(p, q) <= T where q is known. T = 0 never opens a gate; inf always does, even where D is infinite.

    ``measure`` and ``processed`` are as in :meth:`RuleInputs.divergence`.
    """
    if threshold == 0:
        return torch.zeros_like(inputs.has_q)
    if threshold == math.inf:
        return inputs.has_q
    is_reduced = inputs.tree.draft_ids is not None and (inputs.greedy or not processed)
    if is_reduced and divergence(measure).infinite_on_reduced_vocabulary:
        _warn_never_opens(measure)
    return inputs.divergence(measure, processed) <= threshold


@cache
def _warn_never_opens(name: str) -> None:
    """Warn once per divergence."""
    warnings.warn(
        f"divergence {name!r} is infinite wherever the target has mass outside the drafter's reduced vocabulary, so "
        "this gate never opens. Use js, tv, kl_qp or a top-k form, or a drafter with the full vocabulary.",
        stacklevel=2,
    )
