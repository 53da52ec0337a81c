"""Turn a sweep's file into a record: settings compared with exact decoding and with random gates at equal τ.

    python -m benchmarks.findings SWEEP.jsonl benchmarks/results/findings-NAME.json [--judge smollm2-135m]

The sweep's lines hold whole answers and stay out of the repository. The record holds what the sweep's report shows and
the nats that answers spent. It also compares each setting's quality with that of random gates at equal tokens per
forward, interpolated linearly between two rates, with exact as rate 0. With ``--judge`` another model, which should
neither draft nor verify, reads every answer after its prompt as raw text. The record then has its bits per character.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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

QUALITIES = ("score", "log_likelihood_per_token", "copied_4grams", "repeated_4grams")


def judged(sweep: Sweep, judge: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return {temperature: {setting: {"bits_per_character", "less_exact"}}} of the answers under the judge."""
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
    """Return {"settings", "environment", "temperatures": {temperature: {setting: facts}}}, see :func:`facts_of`."""
    seed = sweep.head["settings"]["seed"]
    return {
        "settings": {key: value for key, value in sweep.head["settings"].items() if key != "examples"},
        "environment": sweep.head["environment"],
        "temperatures": {
            f"{at.temperature:g}": facts_of(at.turns, sweep.settings, seed) for at in sweep.at if at.turns
        },
    }


def facts_of(turns: Sequence[Turn], names: Sequence[str], seed: int) -> dict[str, dict[str, Any]]:
    """Return :func:`.summarise` by setting, with ``nats_per_answer`` and ``less_random`` added."""
    summaries = summarise(turns, names, seed)
    against = less_random(turns, names, seed)
    for name, facts in summaries.items():
        spent = [turn.runs[name].answers[0].divergence_spent for turn in turns]
        facts["nats_per_answer"] = {"mean": float(np.mean(spent)), "most": max(spent)}
        facts["less_random"] = against.get(name)
    return summaries


def less_random(turns: Sequence[Turn], names: Sequence[str], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Compare each setting's qualities with those of random gates at equal tokens per forward.

    Returns:
        {setting: {quality: {"mean", "low", "high"}}}: the differences with 95 % percentile bootstrap intervals over
        prompts. None if the setting emits more tokens per forward than every gate.
    """
    gates = [EXACT, *(name for name in names if name.startswith("random"))]
    others = [name for name in names if name not in gates]
    if len(gates) == 1 or not others:
        return {}
    values = (RATES["tau"], *(AVERAGES[quality] for quality in QUALITIES))
    by_prompt = {name: columns(name, turns, *values) for name in names}  # [P, 2 + 2 * qualities]
    prompts = len(by_prompt[EXACT])
    draws = np.random.default_rng(seed).integers(prompts, size=(RESAMPLES, prompts))
    counts = np.stack([np.bincount(row, minlength=prompts) for row in draws])
    weights = np.vstack([np.ones(prompts), counts])  # [1 + R, P]: as measured, then the resamples
    with np.errstate(invalid="ignore"):
        ratios = {name: (sums := weights @ of)[:, ::2] / sums[:, 1::2] for name, of in by_prompt.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in others}
    for place, quality in enumerate(QUALITIES, start=1):
        if not np.isnan(ratios[EXACT][:, place]).any():
            for name in others:
                gaps = [
                    own[place] - _line_at(own[0], [(ratios[gate][row, 0], ratios[gate][row, place]) for gate in gates])
                    for row, own in enumerate(ratios[name])
                ]
                found[name][quality] = _interval(np.array(gaps))
    return found


def _line_at(tau: float, points: Sequence[tuple[float, float]]) -> float:
    """Interpolate the quality of ``points`` (tokens per forward, quality) at ``tau``; NaN to the right of them."""
    x, y = zip(*sorted(points), strict=True)
    return float(np.interp(tau, x, y, right=np.nan))


def _interval(gaps: Any) -> dict[str, float] | None:
    known = gaps[~np.isnan(gaps)]
    if np.isnan(gaps[0]) or len(known) < 0.9 * len(gaps):
        return None
    low, high = np.quantile(known[1:], (0.025, 0.975))
    return {"mean": float(gaps[0]), "low": float(low), "high": float(high)}


def main(argv: Sequence[str] | None = None) -> int:
    """Read the sweep and write the record. Return 2 after bad input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.findings", description=__doc__.split("\n\n")[0])
    parser.add_argument("sweep", type=Path, help="file of `fsd-infer sweep`")
    parser.add_argument("record", type=Path, help="file of the record")
    parser.add_argument("--judge", help="model that reads the answers: built-in name, directory or hub id")
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
