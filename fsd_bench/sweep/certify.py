"""Which settings certainly keep a promise: tests of paired losses, with bounds that hold for prompts like these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fsd_bench.base import Comparison
from fsd_bench.paired import RATES, sums
from fsd_bench.sweep.settings import EXACT, Setting
from fsd_bench.sweep.summary import summarise
from fsd_core.errors import FsdError

SCORE, NATS, SPEED = "score", "nats", "speed"
QUALITIES = (0.99, 0.98, 0.95, 0.9, 0.8)  # levels of the one-number setting
RESAMPLES = 4000


@dataclass(frozen=True)
class Promise:
    """What a setting must keep.

    Attributes:
        kind: ``score``: the mean score is at most ``value`` below exact's (0.02 is two of a hundred answers). ``nats``:
            no answer spends more than ``value``, which the engine enforces as the rule's budget. ``speed``: new tokens
            per second of wall time are at least ``value`` times exact's.
        value: see ``kind``.
        copies: largest rise over exact in the mean share of 4-grams copied from the prompt (0.02 is two points), or
            None.
        repeats: the same for 4-grams that the answer repeats.
    """

    kind: str
    value: float
    copies: float | None = None
    repeats: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in (SCORE, NATS, SPEED):
            raise FsdError(f"unknown promise {self.kind!r}: known are {SCORE}, {NATS} and {SPEED}.")
        if not 0 < self.value < math.inf or (self.kind == SCORE and self.value >= 1):
            limit = "between 0 and 1 (100 points)" if self.kind == SCORE else "above 0 and finite"
            raise FsdError(f"a promise of {self.kind} must be {limit}, got {self.value}.")
        for name, most in self.bounds().items():
            if not 0 < most < 1:
                raise FsdError(f"a bound on {name} must be between 0 and 1 (100 points), got {most}.")

    def bounds(self) -> dict[str, float]:
        """Return the largest rises over exact by name in :class:`fsd_bench.base.MeasuredAnswer`."""
        bounds = {"copied_4grams": self.copies, "repeated_4grams": self.repeats}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def text(self) -> str:
        """Return the promise in words."""
        main = {
            SCORE: f"at most {100 * self.value:g} points of score below exact",
            NATS: f"at most {self.value:g} nats per answer",
            SPEED: f"at least {self.value:g} times exact's speed",
        }[self.kind]
        more = [
            f"at most {100 * most:g} points of {name.replace('_', ' ')} above" for name, most in self.bounds().items()
        ]
        return ", ".join([main, *more])


def certify(
    comparisons: Sequence[Comparison], settings: Sequence[Setting], promise: Promise, confidence: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Return the settings that keep the promise, in order of their tests: {"setting", "p"}."""
    families: dict[str, list[Setting]] = {}
    for setting in settings:
        if setting.name != EXACT:
            families.setdefault(setting.family, []).append(setting)
    level = (1 - confidence) / max(len(families), 1)
    passed = [] if promise.kind == SPEED else [{"setting": EXACT, "p": 0.0}]  # exact keeps every other promise
    for candidates in families.values():
        for setting in reversed(candidates) if promise.kind == SPEED else candidates:
            p = p_value(comparisons, setting.name, promise, seed)
            if p > level:
                break
            passed.append({"setting": setting.name, "p": p})
    return passed


def quality_levels(
    comparisons: Sequence[Comparison], settings: Sequence[Setting], facts: dict[str, dict[str, Any]], promise: Promise,
    confidence: float, seed: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return by quality the fastest rule that certainly keeps that share of exact's score, see ``Calibrated.levels``.

    Each level is a promise of its own, with the bounds on copies and repeats of ``promise``. Settings with a tree of
    their own are left out: a server has one tree. A quality whose rule a higher one has already is left out. No levels
    without scores, or where exact scores nothing.
    """
    score, levels = float(_scores(comparisons, EXACT).mean()), list[dict[str, Any]]()
    for quality in QUALITIES if score > 0 else ():
        needed = replace(promise, kind=SCORE, value=(1 - quality) * score)
        names = {setting["setting"] for setting in certify(comparisons, settings, needed, confidence, seed)}
        speeds = {s.name: float(facts[s.name]["ratios"]["speed"]["ratio"]) for s in settings if s.tree is None}
        fastest = max(names & speeds.keys(), key=lambda name: speeds[name])
        if fastest != EXACT and all(level["rule"] != fastest for level in levels):
            levels.append({"quality": quality, "rule": fastest, "speed": speeds[fastest]})
    return levels


def p_value(comparisons: Sequence[Comparison], name: str, promise: Promise, seed: int = 0) -> float:
    """Return the p-value of the hypothesis that the setting breaks the promise: the largest over its parts."""
    parts = [
        loss_p_value(-score_losses(comparisons, name, quality), most) for quality, most in promise.bounds().items()
    ]
    return max([_main_p_value(comparisons, name, promise, seed), *parts])


def _main_p_value(comparisons: Sequence[Comparison], name: str, promise: Promise, seed: int) -> float:
    if promise.kind == NATS:  # enforced, answer by answer
        return 0.0
    if promise.kind == SCORE:
        return loss_p_value(score_losses(comparisons, name), promise.value, score_scale(comparisons))
    own, exact = (np.array(list(sums(one, comparisons, RATES["speed"]).values())) for one in (name, EXACT))
    draws = np.random.default_rng(seed).integers(len(own), size=(RESAMPLES, len(own)))
    own_sums, exact_sums = own[draws].sum(1), exact[draws].sum(1)  # [resamples, 2]: tokens and seconds
    ratios = (own_sums[:, 0] * exact_sums[:, 1]) / (own_sums[:, 1] * exact_sums[:, 0])
    return float((1 + (ratios < promise.value).sum()) / (1 + RESAMPLES))


def score_losses(comparisons: Sequence[Comparison], name: str, quality: str = SCORE) -> np.ndarray:
    """Return exact's score, or another share, less the setting's [prompts], as means over repeats."""
    return _scores(comparisons, EXACT, quality) - _scores(comparisons, name, quality)


def score_scale(comparisons: Sequence[Comparison]) -> float:
    """Return the score that a whole answer of exact is worth: 1 if answers are right or wrong.

    For graded scores (ROUGE-L) it is their mean weighted by the scores themselves: Σ score² / Σ score.
    """
    scores = _scores(comparisons, EXACT)
    return float((scores**2).sum() / scores.sum()) if scores.any() else 1.0


def _scores(comparisons: Sequence[Comparison], name: str, quality: str = SCORE) -> np.ndarray:
    """Return a setting's scores [prompts] as means over repeats. Answers too short for a 4-gram count 0."""
    by_prompt = sums(name, comparisons, lambda run, answer: (getattr(answer, quality) or 0.0, 1.0))
    return np.array([total / weight for total, weight in by_prompt.values()])


def loss_p_value(losses: np.ndarray, most: float, scale: float = 1.0) -> float:
    """Return the p-value of the hypothesis that the mean of ``losses`` [N], each in [-1, 1], is at least ``most``.

    It is the larger of two. The first is a normal test on paired differences with two pseudo-prompts, one half lost and
    one half won, which guards against few differences (Agresti and Min, 2005). The second is the exact binomial test
    for the hardest case: a setting that loses whole answers, worth ``scale`` each (:func:`score_scale`), and wins none.
    """
    from scipy.stats import binom, norm

    losses, most = losses / scale, most / scale
    count, total = len(losses), float(losses.sum())
    mean, square = total / (count + 2), (float((losses**2).sum()) + 1) / (count + 2)
    normal = norm.cdf((mean - most) / math.sqrt((square - mean**2) / (count + 2)))
    return float(max(normal, binom.cdf(max(math.ceil(round(total, 9)), 0), count, min(most, 1.0))))


def check(comparisons: Sequence[Comparison], name: str, promise: Promise, seed: int = 0) -> dict[str, Any]:
    """Return what was measured of a setting on some prompts, and whether it kept the promise there."""
    measured = summarise(comparisons, [EXACT, name], seed)[name]
    score = measured["differences"].get("score")
    rises = {
        quality: -float(score_losses(comparisons, name, quality).mean())
        for quality in ("copied_4grams", "repeated_4grams")
    }
    kept = {
        SCORE: score is not None and score["mean"] >= -promise.value,
        NATS: measured["nats_per_answer"]["most"] <= promise.value * (1 + 1e-6),
        SPEED: measured["ratios"]["speed"]["ratio"] >= promise.value,
    }[promise.kind] and all(rises[quality] <= most for quality, most in promise.bounds().items())
    return {
        "prompts": len({index for comparison in comparisons for index in comparison.prompts}),
        "score_difference": score,
        "rises": rises,
        **{key: measured["ratios"].get(key) for key in ("speed", "tau", "target_forwards", "answer_tokens")},
        **{key: measured[key] for key in ("same_final_answer", "nats_per_answer")},
        "kept": kept,
    }
