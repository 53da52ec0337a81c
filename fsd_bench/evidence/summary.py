"""A sweep's file as numbers: every setting against exact decoding on the same prompts, with paired intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fsd_bench.base import OF_TEXT, Answer, TimedRun, Turn
from fsd_bench.evidence.lines import read_lines
from fsd_bench.evidence.settings import EXACT
from fsd_bench.intervals import bootstrap_interval
from fsd_bench.paired import agreement, differences, intervals, ratios
from fsd_infer.engine.drafts import Drafts

POSITIONS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # where bins of positions in the answer end


@dataclass
class At:
    """One temperature: answers as the benchmark's turns (whole ones only), and the lines that they came from."""

    temperature: float
    turns: list[Turn] = field(default_factory=list)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by setting


@dataclass
class Sweep:
    """A sweep's file."""

    head: dict[str, Any]
    at: list[At]

    @property
    def settings(self) -> list[str]:
        """Names, exact first."""
        return list(self.head["settings"]["rules"])


def read_sweep(path: str | Path) -> Sweep:
    """The file, finished or not: prompts that not every setting has answered yet are left out.

    Raises:
        FsdError: the file holds no sweep.
    """
    head, lines = read_lines(path)
    names = head["settings"]["rules"]
    by_temperature: dict[float, At] = {value: At(value) for value in head["settings"]["temperatures"]}
    turns: dict[tuple[float, int, int], dict[str, dict[str, Any]]] = {}
    for line in lines:
        place = line["temperature"], line["prompt"], line["repeat"]
        turns.setdefault(place, {})[line["setting"]] = line
    for (temperature, prompt, repeat), runs in turns.items():
        if len(runs) < len(names):
            continue
        at = by_temperature[temperature]
        at.turns.append(Turn(prompt, repeat, [prompt], {name: _run(runs[name]) for name in names}))
        for name in names:
            at.lines.setdefault(name, []).append(runs[name])
    return Sweep(head, list(by_temperature.values()))


def _run(line: dict[str, Any]) -> TimedRun:
    line["divergence_spent"] = float(line["divergence_spent"])  # may be "inf", which JSON lacks
    regrets = {  # may be "inf" too; files of earlier versions have none
        name: [[float(value) for value in values] for values in depths]
        for name, depths in line.get("regrets", {}).items()
    }
    answer = Answer(
        tokens=line["tokens"], verified_tokens=len(line["tokens"]) - 1, regrets=regrets,
        **{name: line[name] for name in (
            "target_forwards", "gate_open_fraction", "gate_accepted_fraction", "divergence_spent", "finish_reason",
            "log_likelihood", "final", *OF_TEXT,
        )},
    )  # fmt: skip
    return TimedRun(line["seconds"], line["prefill_seconds"], [answer])


def summarise(at: At, names: Sequence[str], seed: int = 0) -> dict[str, dict[str, Any]]:
    """By setting: means, and how they compare with exact's on the same prompts.

    ``means``, ``differences``, ``ratios`` and ``same_final_answer`` are those of :mod:`fsd_bench.paired`. Among
    the ratios are also ``speed`` (new tokens per second of wall time, prefill included) and ``tau`` (tokens that
    verifying forwards emitted per forward). ``tokens_per_second``, ``tau``, ``divergence_spent`` (nats per answer) and
    ``gate_open_fraction`` (per token) are plain numbers, ``drafts`` is :meth:`.Drafts.summary` of all.
    """
    summaries = {}
    for name in names:
        runs = [turn.runs[name] for turn in at.turns]
        answers = [run.answers[0] for run in runs]
        tokens = sum(answer.length for answer in answers)
        forwards = sum(answer.target_forwards or 0 for answer in answers)
        compared = ratios(name, EXACT, at.turns, seed)
        compared["speed"] = _rate_ratio(at, name, lambda run: (run.answers[0].length, run.seconds), seed)
        compared["tau"] = _rate_ratio(
            at, name, lambda run: (run.answers[0].length - 1, run.answers[0].target_forwards or 0), seed
        )
        summaries[name] = {
            "means": intervals(name, at.turns, seed),
            "differences": differences(name, EXACT, at.turns, seed),
            "ratios": compared,
            "same_final_answer": agreement(name, EXACT, at.turns, seed),
            "tokens_per_second": tokens / sum(run.seconds for run in runs),
            "tau": (tokens - len(answers)) / forwards if forwards else None,
            "divergence_spent": float(np.mean([answer.divergence_spent for answer in answers])),
            "drafts": Drafts.pooled(Drafts(answer.regrets) for answer in answers).summary(),
            "gate_open_fraction": sum(a.gate_open_fraction * a.length for a in answers) / max(tokens, 1),
        }
    return summaries


def per_prompt(at: At, name: str, value: Any) -> np.ndarray:
    """[prompts, ...] sums over repeats of ``value(run)``, a tuple of numbers, in the order of the prompts."""
    sums: dict[int, np.ndarray] = {}
    for turn in at.turns:
        values = np.asarray(value(turn.runs[name]), dtype=float)
        sums[turn.group] = sums.get(turn.group, 0.0) + values
    return np.stack([sums[prompt] for prompt in sorted(sums)])


def _rate_ratio(at: At, name: str, value: Any, seed: int) -> dict[str, Any]:
    """(Σ a / Σ b) / (exact's Σ a / Σ b) of ``value`` -> (a, b): {"ratio", "low", "high", "prompts"}."""
    columns = [*per_prompt(at, name, value).T, *per_prompt(at, EXACT, value).T]

    def statistic(*samples: Any, axis: int) -> Any:
        a, b, other_a, other_b = samples
        with np.errstate(divide="ignore", invalid="ignore"):
            return (a.sum(axis) * other_b.sum(axis)) / (b.sum(axis) * other_a.sum(axis))

    low, high = bootstrap_interval(columns, statistic, seed)
    ratio = float(statistic(*columns, axis=-1))
    return {"ratio": ratio, "low": low, "high": high, "prompts": len(columns[0])}


def tau_by_position(lines: Sequence[dict[str, Any]]) -> list[tuple[int, int, float, int]]:
    """(first position, end, tokens per round, rounds) of bins of positions in the answer at which rounds begin.

    The prefill's own token is left out, and so is an answer's last round, which its end may have cut.
    """
    bins: dict[int, list[int]] = {}
    for line in lines:
        place = line["rounds"][0] if line["rounds"] else 0
        for count in line["rounds"][1:-1]:
            bins.setdefault(next((end for end in POSITIONS if place < end), POSITIONS[-1]), []).append(count)
            place += count
    starts = dict(zip(POSITIONS, (0, *POSITIONS)))
    return [(starts[end], end, float(np.mean(bins[end])), len(bins[end])) for end in sorted(bins)]
