"""Summarise a sweep: every setting compared with exact decoding on the same prompts, with paired intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fsd_bench.base import Comparison
from fsd_bench.paired import RATES, SUMS, against, intervals
from fsd_bench.record import summary
from fsd_bench.sweep.settings import EXACT

POSITIONS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # where bins of positions in the answer end
KEPT = ("tokens_per_second", "tau", "divergence_spent", "drafts", "gate_open_fraction")


def summarise(comparisons: Sequence[Comparison], names: Sequence[str], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return by setting: means, and how they compare with exact's on the same prompts.

    ``means``, ``differences``, ``ratios`` (with ``speed`` and ``tau``) and ``same_final_answer`` are those of
    :mod:`fsd_bench.paired`. :data:`KEPT` are numbers as in the record of a benchmark. ``nats_per_answer`` has the mean
    and the most that an answer spent.
    """
    summaries = {}
    for name in names:
        facts = summary(name, comparisons)
        spent = [answer.divergence_spent for comparison in comparisons for answer in comparison.runs[name].answers]
        summaries[name] = {
            "means": intervals(name, comparisons, seed),
            **against(name, EXACT, comparisons, seed, {**SUMS, **RATES}),
            **{key: facts[key] for key in KEPT},
            "nats_per_answer": {"mean": float(np.mean(spent)), "most": max(spent)},
        }
    return summaries


def tau_by_position(answers: Iterable[Sequence[int]]) -> list[tuple[int, int, float, int]]:
    """Bin rounds by the position in the answer at which they begin.

    Args:
        answers: tokens of each of an answer's rounds. The prefill's token and the last round, which the answer's end
            may have cut, are left out.

    Returns:
        (first position, end, tokens per round, rounds) of each bin.
    """
    bins: dict[int, list[int]] = {}
    for rounds in answers:
        position = rounds[0] if rounds else 0
        for count in rounds[1:-1]:
            bins.setdefault(next((end for end in POSITIONS if position < end), POSITIONS[-1]), []).append(count)
            position += count
    starts = dict(zip(POSITIONS, (0, *POSITIONS)))
    return [(starts[end], end, float(np.mean(bins[end])), len(bins[end])) for end in sorted(bins)]
