"""Means of what answers are like, and how they differ from a baseline's on the same prompts, with intervals.

All intervals are 95 % percentile bootstrap intervals over prompts. A prompt counts where both methods were measured.

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
same_final_answer         is :func:`.final_answer` the baseline's                mean, of prompts where the baseline's
                                                                                 answer has one
========================  =====================================================  =======================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsd_bench.base import Answer, Turn
from fsd_bench.intervals import mean_interval, ratio_interval

Pair = tuple[float, float]  # value and weight


def _plain(value: float | None) -> Pair | None:
    return None if value is None else (value, 1.0)


# what is averaged over answers, by quantity: (value, weight), None where an answer has none
AVERAGES: dict[str, Callable[[Answer], Pair | None]] = {
    "score": lambda answer: _plain(answer.score),
    "log_likelihood_per_token": lambda answer: (
        None if answer.log_likelihood is None else (answer.log_likelihood, float(answer.length))
    ),
    "copied_4grams": lambda answer: _plain(answer.copied_4grams),
    "coverage": lambda answer: _plain(answer.coverage),
    "other_language": lambda answer: _plain(answer.other_language),
    "repeated_4grams": lambda answer: _plain(answer.repeated_4grams),
    "finished_fraction": lambda answer: (float(answer.finish_reason == "stop"), 1.0),
}
SUMS: dict[str, Callable[[Answer], Pair | None]] = {
    "answer_tokens": lambda answer: (float(answer.length), 1.0),
    "target_forwards": lambda answer: _plain(answer.target_forwards),
}


def intervals(name: str, turns: Sequence[Turn], seed: int = 0) -> dict[str, Any]:
    """Mean and interval of each measured quantity of one method: {"mean", "low", "high", "prompts"}."""
    sums = {quantity: _sums(name, turns, value) for quantity, value in {**AVERAGES, **SUMS}.items()}
    return {quantity: mean_interval(list(own.values()), seed=seed) for quantity, own in sums.items() if own}


def differences(name: str, baseline: str, turns: Sequence[Turn], seed: int = 0) -> dict[str, Any]:
    """Of each of :data:`AVERAGES` that was measured: the method's mean less the baseline's."""
    compared = {}
    for quantity, value in AVERAGES.items():
        own, other = _shared(name, baseline, turns, value)
        if own:
            compared[quantity] = mean_interval(own, other, seed)
    return compared


def ratios(name: str, baseline: str, turns: Sequence[Turn], seed: int = 0) -> dict[str, Any]:
    """Of each of :data:`SUMS` that was measured: the method's sum / the baseline's, {"ratio", "low", ...}."""
    compared = {}
    for quantity, value in SUMS.items():
        own, other = _shared(name, baseline, turns, value)
        if own and any(total for total, _ in other):
            compared[quantity] = ratio_interval([total for total, _ in own], [total for total, _ in other], seed)
    return compared


def agreement(name: str, baseline: str, turns: Sequence[Turn], seed: int = 0) -> dict[str, Any] | None:
    """Share of prompts whose final answer is the baseline's; None if the baseline's answers have none."""
    sums: dict[int, Pair] = {}
    for turn in turns:
        both = (turn.runs[name].answers, turn.runs[baseline].answers)
        for index, own, other in zip(turn.prompts, *both, strict=True):
            if other.final is not None:
                _add(sums, index, (float(own.final == other.final), 1.0))
    return mean_interval(list(sums.values()), seed=seed) if sums else None


def against(names: Sequence[str], baseline: str, turns: Sequence[Turn], seed: int = 0) -> Mapping[str, dict[str, Any]]:
    """By method other than the baseline: ``differences``, ``ratios`` and ``same_final_answer``."""
    return {
        name: {
            "differences": differences(name, baseline, turns, seed),
            "ratios": ratios(name, baseline, turns, seed),
            "same_final_answer": agreement(name, baseline, turns, seed),
        }
        for name in names
        if name != baseline
    }


def _shared(
    name: str, baseline: str, turns: Sequence[Turn], value: Callable[[Answer], Pair | None]
) -> tuple[list[Pair], list[Pair]]:
    """Both methods' sums of the prompts that both have."""
    own, other = _sums(name, turns, value), _sums(baseline, turns, value)
    both = [index for index in own if index in other]
    return [own[index] for index in both], [other[index] for index in both]


def _sums(name: str, turns: Sequence[Turn], value: Callable[[Answer], Pair | None]) -> dict[int, Pair]:
    """By prompt: Σ value · weight and Σ weight over its answers that have one."""
    sums: dict[int, Pair] = {}
    for turn in turns:
        for index, answer in zip(turn.prompts, turn.runs[name].answers, strict=True):
            pair = value(answer)
            if pair is not None:
                _add(sums, index, (pair[0] * pair[1], pair[1]))
    return sums


def _add(sums: dict[int, Pair], index: int, pair: Pair) -> None:
    total, weights = sums.get(index, (0.0, 0.0))
    sums[index] = total + pair[0], weights + pair[1]
