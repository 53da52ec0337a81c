"""Average the qualities of answers, and compare them with a baseline's on the same prompts, with intervals.

All intervals are 95 % percentile bootstrap intervals over prompts. A prompt counts if both methods were measured on it.

========================  =====================================================  =======================================
quantity                  an answer's value                                      compared with a baseline's
========================  =====================================================  =======================================
score                     1 right, 0 wrong, or chrF or ROUGE-L                   difference of means
log_likelihood_per_token  the target's raw log-probability, nats                 difference of means over tokens
copied_4grams             share of its 4-grams that stand in its prompt          difference of means
repeated_4grams           share of its 4-grams that occurred earlier in it       difference of means
coverage                  share of its words in fragments of its prompt          difference of means
other_language            1 if it is in another language than its reference      difference of means
finished_fraction         1 if a stop token ended it, 0 if the length limit did  difference of means
answer_tokens             new tokens                                             ratio of sums
target_forwards           verifying forwards                                     ratio of sums
speed, tau                new tokens per second; tokens that verifying forwards  ratio of means (sweeps)
                          emitted per forward
tau_answer_mean           tokens that its verifying forwards emitted per forward  –
lost, gained              right under the baseline and wrong here; the reverse   count, with McNemar's exact p
retention                 score                                                  ratio of means
same_final_answer         1 if its :func:`.final_answer` is the baseline's       mean over prompts with a final answer
========================  =====================================================  =======================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsd_bench.base import Comparison, MeasuredAnswer, TimedRun
from fsd_bench.intervals import mean_interval, ratio_interval

Pair = tuple[float, float]  # sum and weight
Value = Callable[[TimedRun, MeasuredAnswer], "Pair | None"]  # None for an answer without a value


def _each(name: str) -> Value:
    """Return a field of answers, each with weight 1."""

    def value(run: TimedRun, answer: MeasuredAnswer) -> Pair | None:
        field = getattr(answer, name)
        return None if field is None else (float(field), 1.0)

    return value


def _per_token(name: str) -> Value:
    """Return a field of answers, each with its length as weight."""

    def value(run: TimedRun, answer: MeasuredAnswer) -> Pair | None:
        field = getattr(answer, name)
        return None if field is None else (field * answer.length, float(answer.length))

    return value


def _emitted(run: TimedRun, answer: MeasuredAnswer) -> Pair | None:
    forwards = answer.target_forwards
    return None if forwards is None else (float(answer.verified_tokens or 0), float(forwards))


def _tau(run: TimedRun, answer: MeasuredAnswer) -> Pair | None:
    return None if not answer.target_forwards else ((answer.verified_tokens or 0) / answer.target_forwards, 1.0)


AVERAGES: dict[str, Value] = {
    "score": _each("score"),
    "log_likelihood_per_token": _per_token("log_likelihood"),
    **{name: _each(name) for name in ("copied_4grams", "coverage", "other_language", "repeated_4grams")},
    "finished_fraction": lambda run, answer: (float(answer.finish_reason == "stop"), 1.0),
}
SUMS: dict[str, Value] = {"answer_tokens": _each("length"), "target_forwards": _each("target_forwards")}
RATES: dict[str, Value] = {"speed": lambda run, answer: (float(answer.length), run.seconds), "tau": _emitted}
QUANTITIES: dict[str, Value] = {  # of a method's summary
    "tau": _emitted,
    "tau_answer_mean": _tau,
    **SUMS,
    **{name: _per_token(name) for name in ("gate_open_fraction", "gate_accepted_fraction")},
    "divergence_spent": _each("divergence_spent"),
    **AVERAGES,
}


def pooled(name: str, comparisons: Sequence[Comparison], value: Value) -> float | None:
    """Return Σ sums / Σ weights over a method's answers, or None without weights."""
    pairs = list(sums(name, comparisons, value).values())
    weights = sum(weight for _, weight in pairs)
    return sum(total for total, _ in pairs) / weights if weights else None


def sums(name: str, comparisons: Sequence[Comparison], value: Value) -> dict[int, Pair]:
    """Return sums and weights by prompt over a method's answers."""
    by_prompt: dict[int, Pair] = {}
    for comparison in comparisons:
        run = comparison.runs[name]
        for index, answer in zip(comparison.prompts, run.answers, strict=True):
            pair = value(run, answer)
            if pair is not None:
                total, weights = by_prompt.get(index, (0.0, 0.0))
                by_prompt[index] = total + pair[0], weights + pair[1]
    return by_prompt


def intervals(name: str, comparisons: Sequence[Comparison], seed: int = 0) -> dict[str, Any]:
    """Return mean and interval of each measured quantity of a method: {"mean", "low", "high", "prompts"}."""
    measured = {quantity: sums(name, comparisons, value) for quantity, value in {**AVERAGES, **SUMS}.items()}
    return {quantity: mean_interval(list(pairs.values()), seed=seed) for quantity, pairs in measured.items() if pairs}


def against(
    name: str, baseline: str, comparisons: Sequence[Comparison], seed: int = 0, rates: Mapping[str, Value] = SUMS
) -> dict[str, Any]:
    """Compare a method with a baseline in the quantities that were measured.

    Returns:
        ``differences``: the method's means less the baseline's. ``ratios``: of ``rates``. ``same_final_answer``: share
        of prompts with the baseline's final answer, or None if the baseline has none. ``flips``: see :func:`flips`.
    """
    differences, ratios = {}, {}
    for quantity, value in AVERAGES.items():
        own, other = _shared(name, baseline, comparisons, value)
        if own:
            differences[quantity] = mean_interval(own, other, seed)
    for quantity, value in rates.items():
        own, other = _shared(name, baseline, comparisons, value)
        if any(total for total, _ in other):
            ratios[quantity] = ratio_interval(own, other, seed)
    agreement = _agreement(name, baseline, comparisons, seed)
    own, other = _shared(name, baseline, comparisons, AVERAGES["score"])
    return {"differences": differences, "ratios": ratios, "same_final_answer": agreement, "flips": flips(own, other)}


def flips(own: Sequence[Pair], other: Sequence[Pair]) -> dict[str, Any] | None:
    """Return how many answers a method loses and gains, with McNemar's exact two-sided p (1947).

    Args:
        own: score and number of repeats by prompt.
        other: the baseline's, of the same prompts.

    Returns:
        {"lost", "gained", "p"}; None without scores, with several repeats, or with scores between 0 and 1.
    """
    pairs = [(mine, theirs) for (mine, _), (theirs, _) in zip(own, other, strict=True)]
    if not pairs or any(weight != 1 for _, weight in own) or {value for pair in pairs for value in pair} - {0.0, 1.0}:
        return None
    lost, gained = pairs.count((0.0, 1.0)), pairs.count((1.0, 0.0))
    fewer, all_flips = min(lost, gained), lost + gained
    tail = sum(math.comb(all_flips, count) for count in range(fewer + 1)) / 2**all_flips
    return {"lost": lost, "gained": gained, "p": min(1.0, 2 * tail)}


def _agreement(name: str, baseline: str, comparisons: Sequence[Comparison], seed: int) -> dict[str, Any] | None:
    same: dict[int, Pair] = {}
    for comparison in comparisons:
        for index, own, other in zip(
            comparison.prompts, comparison.runs[name].answers, comparison.runs[baseline].answers, strict=True
        ):
            if other.final is not None:
                total, weight = same.get(index, (0.0, 0.0))
                same[index] = total + (own.final == other.final), weight + 1.0
    return mean_interval(list(same.values()), seed=seed) if same else None


def _shared(name: str, baseline: str, comparisons: Sequence[Comparison], value: Value) -> tuple[list[Pair], list[Pair]]:
    """Return both methods' sums over the prompts that both have."""
    own, other = sums(name, comparisons, value), sums(baseline, comparisons, value)
    both = [index for index in own if index in other]
    return [own[index] for index in both], [other[index] for index in both]
