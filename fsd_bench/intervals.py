"""Compute 95 % percentile bootstrap intervals of medians, weighted means and ratios of sums."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def interval(values: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Return the median of ``values`` with its interval: {"median", "low", "high", "pairs"}."""
    if not values:
        return {"median": None, "low": None, "high": None, "pairs": 0}
    low, high = bootstrap_interval([values], np.median, seed)
    return {"median": statistics.median(values), "low": low, "high": high, "pairs": len(values)}


def bootstrap_interval(samples: Sequence[Any], statistic: Callable[..., Any], seed: int) -> tuple[float, float]:
    """Return the interval of ``statistic(*samples, axis)``, resampled together. A single one is its own, see
    :func:`is_single`.
    """
    if len(samples[0]) == 1:
        value = float(statistic(*map(np.asarray, samples), axis=-1))
        return value, value
    draws = np.random.default_rng(seed).integers(0, len(samples[0]), (RESAMPLES, len(samples[0])))
    values = statistic(*(np.asarray(sample)[draws] for sample in samples), axis=-1)
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


Pairs = Sequence[tuple[float, float]]  # (sum, weight) by prompt


def mean_interval(own: Pairs, other: Pairs | None = None, seed: int = 0) -> dict[str, Any]:
    """Return Σ sums / Σ weights with its interval over prompts.

    Args:
        own: at least one pair.
        other: pairs of the same prompts. If given, the result is the difference, own less other.
        seed: seed of the bootstrap.

    Returns:
        {"mean", "low", "high", "prompts"}
    """
    return _of_means("mean", operator.pos if other is None else operator.sub, own, other, seed)


def ratio_interval(own: Pairs, other: Pairs, seed: int = 0) -> dict[str, Any]:
    """Return the ratio of means, own / other, as {"ratio", "low", "high", "prompts"}. other must not be 0."""
    return _of_means("ratio", operator.truediv, own, other, seed)


def _of_means(key: str, combine: Callable[..., Any], own: Pairs, other: Pairs | None, seed: int) -> dict[str, Any]:
    """Return ``combine`` of both means with its interval."""
    columns = [np.array(column, dtype=float) for pairs in (own, other) if pairs is not None for column in zip(*pairs)]

    def statistic(*samples: Any, axis: int) -> Any:
        sums = [sample.sum(axis) for sample in samples]
        with np.errstate(divide="ignore", invalid="ignore"):
            return combine(*(total / weight for total, weight in zip(sums[::2], sums[1::2])))

    low, high = bootstrap_interval(columns, statistic, seed)
    return {key: float(statistic(*columns, axis=-1)), "low": low, "high": high, "prompts": len(own)}


def interval_text(
    values: Mapping[str, Any] | None, centre: str, form: str = ".2f", scale: float = 1.0, around: str = "[{}, {}]",
    absent: str = "-",
) -> str:  # fmt: skip
    """Format an interval as "middle [low, high]".

    Args:
        values: the interval; None: it was not measured.
        centre: key of the middle.
        form: format of the numbers.
        scale: a factor of all.
        around: how bounds are written. Those of one observation are "n = 1" in the same brackets, and one that is not
            finite, as where some prompts have no rounds, is "?".
        absent: the text without a middle.
    """
    if values is None or values[centre] is None:
        return absent
    text, low, high = (
        "?" if values[key] is None or not math.isfinite(values[key]) else f"{scale * values[key] + 0.0:{form}}"
        for key in (centre, "low", "high")
    )
    bounds = f"{around[0]}n = 1{around[-1]}" if is_single(values) else around.format(low, high)
    return f"{text} {bounds}"


def mean_text(interval: Mapping[str, Any] | None, scale: float = 1.0, digits: int = 1, signed: bool = False) -> str:
    """Format a :func:`mean_interval`."""
    return interval_text(interval, "mean", f"{'+' if signed else ''}.{digits}f", scale)


def ratio_text(interval: Mapping[str, Any] | None, centre: str = "ratio") -> str:
    """Format a :func:`ratio_interval`, or an :func:`interval` with ``centre="median"``."""
    return interval_text(interval, centre)


def is_single(values: Mapping[str, Any]) -> bool:
    """Return whether an interval is of one observation, which says nothing of others."""
    return values.get("prompts", values.get("pairs")) == 1
