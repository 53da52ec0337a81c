"""A sweep's file as a record: settings beside exact decoding, and beside random gates at equal tokens per forward.

The sweep's lines hold whole answers and stay out of the repository; the record holds what its report shows, the nats
that answers spent, and for each setting how its score and likelihood differ from those that the sweep's random gates
reach where they emit as many tokens per forward. Between two rates a line is drawn, from exact on, which is rate 0.
With ``--judge`` another model reads every answer after its prompt, as raw text: bits per character, and how they differ
from exact's. It should neither draft nor verify.

Run: python -m benchmarks.findings SWEEP.jsonl benchmarks/results/findings-NAME.json [--judge smollm2-135m]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsd_bench.base import Turn
from fsd_bench.evidence.settings import EXACT
from fsd_bench.evidence.summary import summarise
from fsd_bench.evidence.sweep import Sweep, read_sweep
from fsd_bench.intervals import RESAMPLES, mean_interval
from fsd_bench.likelihood import log_likelihoods
from fsd_bench.paired import AVERAGES, RATES, columns
from fsd_bench.record import write_record
from fsd_infer import FuzzyDecoder
from fsd_infer.errors import FsdError
from fsd_infer.files import jsonable

Floats = NDArray[np.float64]

QUALITIES = ("score", "log_likelihood_per_token", "copied_4grams", "repeated_4grams")


def judged(sweep: Sweep, judge: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By temperature and setting: ``bits_per_character`` of the answers under the judge, and less exact's."""
    decoder = FuzzyDecoder.from_pretrained(judge, "none")
    readings: dict[str, dict[str, dict[str, Any]]] = {}
    for at in sweep.at:
        bits: dict[str, list[tuple[float, float]]] = {}
        for name in sweep.settings if at.turns else []:
            answers = [answer.text or "" for answer in at.answers(name)]
            texts = [(sweep.head["prompts"][turn.group]["text"], text) for turn, text in zip(at.turns, answers)]
            pairs = [tuple(decoder.encode(text, chat=False) for text in pair) for pair in texts]
            sums = log_likelihoods(decoder.target, [(prompt, answer or [0]) for prompt, answer in pairs])
            bits[name] = [(-nats / math.log(2), float(len(text))) for (nats, _), (_, text) in zip(sums, texts)]
        readings[f"{at.temperature:g}"] = {
            name: {
                "bits_per_character": mean_interval(own),
                "less_exact": mean_interval(own, bits[EXACT]) if name != EXACT else None,
            }
            for name, own in bits.items()
        }
    return readings


def record_of(sweep: Sweep) -> dict[str, Any]:
    """``{"settings", "environment", "temperatures": {"0": {setting: facts}}}``, see :func:`facts_of`."""
    seed = sweep.head["settings"]["seed"]
    return {
        "settings": {key: value for key, value in sweep.head["settings"].items() if key != "examples"},
        "environment": sweep.head["environment"],
        "temperatures": {
            f"{at.temperature:g}": facts_of(at.turns, sweep.settings, seed) for at in sweep.at if at.turns
        },
    }


def facts_of(turns: Sequence[Turn], names: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """By setting: :func:`fsd_bench.evidence.summary.summarise`, ``nats_per_answer`` and ``less_random``."""
    summaries = summarise(turns, names, seed)
    against = less_random(turns, names, seed)
    for name, facts in summaries.items():
        spent = [turn.runs[name].answers[0].divergence_spent for turn in turns]
        facts["nats_per_answer"] = {"mean": float(np.mean(spent)), "most": max(spent)}
        facts["less_random"] = against.get(name)
    return summaries


def less_random(turns: Sequence[Turn], names: Sequence[str], seed: int = 0) -> dict[str, dict[str, Any]]:
    """By setting and quality: its mean less that of random gates at equal tokens per forward, {"mean", "low", "high"}.

    95 % percentile bootstrap intervals over prompts. None where the setting emits more per forward than every gate.
    """
    gates = [EXACT, *(name for name in names if name.startswith("random"))]
    others = [name for name in names if name not in gates]
    if len(gates) == 1 or not others:
        return {}
    values = (RATES["tau"], *(AVERAGES[quality] for quality in QUALITIES))
    by_prompt = {name: columns(name, turns, *values) for name in names}  # [P, 2 + 2 * qualities]
    prompts = len(by_prompt[EXACT])
    draws = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    weights = np.stack([np.bincount(row, minlength=prompts) for row in draws]).astype(float)
    weights = np.concatenate([np.ones((1, prompts)), weights])  # the first row: as measured
    sums = {name: weights @ values for name, values in by_prompt.items()}  # [1 + W, ...]
    tau = {name: values[:, 0] / values[:, 1] for name, values in sums.items()}
    gaps_by_name: dict[str, dict[str, Any]] = {name: {} for name in others}
    for place, quality in enumerate(QUALITIES):
        with np.errstate(invalid="ignore"):
            means = {name: values[:, 2 + 2 * place] / values[:, 3 + 2 * place] for name, values in sums.items()}
        if np.isnan(means[EXACT]).any():
            continue
        for name in others:
            gaps = np.array([
                means[name][row] - _at(tau[name][row], [(tau[gate][row], means[gate][row]) for gate in gates])
                for row in range(len(weights))
            ])  # fmt: skip
            gaps_by_name[name][quality] = _interval(gaps)
    return gaps_by_name


def _at(tau: float, points: Sequence[tuple[float, float]]) -> float:
    """The line through ``points`` (tokens per forward, quality) at ``tau``; NaN to the right of all of them."""
    x, y = zip(*sorted(points), strict=True)
    return float(np.interp(tau, x, y, right=np.nan))


def _interval(gaps: Floats) -> dict[str, float] | None:
    known = gaps[~np.isnan(gaps)]
    if np.isnan(gaps[0]) or len(known) < 0.9 * len(gaps):
        return None
    low, high = np.quantile(known[1:], (0.025, 0.975))
    return {"mean": float(gaps[0]), "low": float(low), "high": float(high)}


def main(argv: Sequence[str] | None = None) -> int:
    """Read, write. 2 after bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.findings", description=__doc__.split("\n\n")[0])
    parser.add_argument("sweep", type=Path, help="file of `fsd-infer sweep`")
    parser.add_argument("record", type=Path, help="where the record goes")
    parser.add_argument("--judge", help="a model that reads the answers: built-in name, directory or hub id")
    args = parser.parse_args(argv)
    try:
        sweep = read_sweep(args.sweep)
        record = record_of(sweep)
        if args.judge is not None:
            record["judge"] = {"model": args.judge, "temperatures": judged(sweep, args.judge)}
        write_record(args.record, jsonable(record))
    except FsdError as error:
        print(f"findings: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
