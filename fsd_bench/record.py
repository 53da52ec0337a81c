"""Turn timed runs into the record of a benchmark: totals, categories, ratios pair by pair.

Speeds are medians over units of medians over repeats, in new tokens per second of wall time. A unit is a group of
prompts that are decoded together, or a block of such groups (its tokens / its seconds). ``tokens_per_second`` counts
the prefill; ``decode_tokens_per_second`` excludes it and its token. ``tau`` is pooled: tokens emitted by verifying
forwards / verifying forwards; ``tau_category_mean`` weighs categories equally, ``tau_answer_mean`` answers.
``accepted_by_position`` is the share of rounds that accepted 1, 2, … drafts or more. ``target_forwards``,
``answer_tokens`` and ``divergence_spent`` (nats) are means per answer. Gate fractions and ``log_likelihood_per_token``
(nats, raw) are means per token. ``drafts`` pools the drafters' first choices, see
:class:`.FirstChoiceStats`. ``phases`` are seconds over all runs, ``phase_fractions`` their
shares, ``milliseconds_per_round`` each phase after the prefill / verifying forwards. ``round_overhead_fraction`` is the
share of the time after the prefill that neither target nor drafter takes. What a method does not report is None.

A ratio of speeds is the method's / the baseline's on the same unit (of seconds the inverse, so that above 1 is faster):
the median over units with a 95 % percentile bootstrap interval. Other ratios, a method's ``intervals``,
``differences[BASELINE][METHOD]`` and ``agreement[BASELINE][METHOD]`` (the share of prompts with the baseline's final
answer) are those of :mod:`fsd_bench.paired`, over prompts. Quantities that were not measured are absent.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fsd_bench.base import OF_TEXT, Comparison, MeasuredAnswer, TimedRun
from fsd_bench.intervals import interval
from fsd_bench.paired import AVERAGES, QUANTITIES, RATES, SUMS, against, intervals, pooled
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, write_text
from fsd_infer.engine.first_choices import FirstChoiceStats

# entries of a list, two levels deep in indented JSON
_DEEP = re.compile(r"^(  )(\{$.*?^  \}|\[$.*?^  \])", re.MULTILINE | re.DOTALL)
RATIOS = ("tokens_per_second", "decode_tokens_per_second", "seconds_per_answer")
SPEEDS = (*RATIOS, "prefill_seconds", "decode_seconds")
OF_ANSWER = (
    *("target_forwards", "gate_open_fraction", "gate_accepted_fraction", "divergence_spent", "finish_reason"), *OF_TEXT
)  # fmt: skip
BY_CATEGORY = ("answers", "tokens_per_second", "tau", "answer_tokens", "log_likelihood_per_token", "score")


Cell = dict[str, "float | None"]  # one method on one unit: medians over repeats


@dataclass(frozen=True)
class BenchPrompt:
    """One encoded prompt and where it stands."""

    id: str
    category: str
    where: str
    ids: list[int]


def build_record(
    prompts: Sequence[BenchPrompt],
    methods: Mapping[str, dict[str, Any]],
    comparisons: Sequence[Comparison],
    seed: int = 0,
    baselines: Sequence[str] = (),
    blocks: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Build a record's ``methods``, ``baseline``, ``ratios``, ``differences``, ``agreement``, ``flips``, ``prompts``.

    The module says what the quantities are.

    Args:
        prompts: all prompts that the comparisons' indices refer to.
        methods: description of each method by name, in the order of the report.
        comparisons: every group and repeat.
        seed: seed of the bootstrap.
        baselines: methods to compare with, see :func:`choose_baselines`.
        blocks: block of each group; None: each group is a unit.
    """
    chosen = choose_baselines(list(methods), baselines)
    cells = {name: _cells(name, comparisons, blocks) for name in methods}
    reference = _first_tokens(chosen[0], comparisons)
    by_category: dict[str, list[Comparison]] = {prompt.category: [] for prompt in prompts}
    for comparison in comparisons:
        by_category[prompts[comparison.prompts[0]].category].append(comparison)
    facts = {
        name: _facts(name, description, comparisons, cells[name], reference, by_category, seed)
        for name, description in methods.items()
    }
    compared = {
        other: {name: _beside(name, other, comparisons, cells, seed) for name in methods if name != other}
        for other in chosen
    }

    def table(key: str) -> dict[str, dict[str, Any]]:
        return {other: {name: values[key] for name, values in names.items()} for other, names in compared.items()}

    return {
        "methods": facts,
        "baseline": chosen[0],
        "ratios": table("ratios"),
        "differences": table("differences"),
        "agreement": table("same_final_answer"),
        "flips": table("flips"),
        "prompts": _prompt_rows(prompts, methods, comparisons),
    }


def _facts(
    name: str,
    description: Mapping[str, Any],
    comparisons: Sequence[Comparison],
    cells: Mapping[int, Cell],
    reference: Mapping[int, list[int] | None],
    by_category: Mapping[str, Sequence[Comparison]],
    seed: int,
) -> dict[str, Any]:
    """Return what a record says of one method.

    Args:
        name: name of the method.
        description: description of its options.
        comparisons: every group and repeat.
        cells: its speeds by unit.
        reference: tokens of the first baseline's answers, by prompt.
        by_category: the comparisons of each category.
        seed: seed of the bootstrap.
    """
    parts = {category: summary(name, of_category) for category, of_category in by_category.items()}
    return {
        **summary(name, comparisons, cells),
        "tau_category_mean": _mean([part["tau"] for part in parts.values()]),
        "identical_to_baseline": _mean(
            [_same(own, reference[i]) for i, own in _first_tokens(name, comparisons).items()]
        ),
        **_phases(name, comparisons),
        **description,
        "intervals": intervals(name, comparisons, seed),
        "categories": {category: {key: part[key] for key in BY_CATEGORY} for category, part in parts.items()},
    }


def _beside(
    name: str, baseline: str, comparisons: Sequence[Comparison], cells: Mapping[str, Mapping[int, Cell]], seed: int
) -> dict[str, Any]:
    """Compare a method with a baseline: speeds unit by unit, everything else prompt by prompt."""
    speeds = {}
    for quantity in RATIOS:
        pairs = [(own[quantity], cells[baseline][unit][quantity]) for unit, own in cells[name].items()]
        values = [b / a if quantity == "seconds_per_answer" else a / b for a, b in pairs if a and b]
        speeds[quantity] = interval(values, seed)
    compared = against(name, baseline, comparisons, seed, {**SUMS, "tau": RATES["tau"], "retention": AVERAGES["score"]})
    return {**compared, "ratios": {**speeds, **compared["ratios"]}}


def choose_baselines(names: Sequence[str], chosen: Sequence[str] = ()) -> list[str]:
    """Return the names of the methods that the others are compared with. Tokens are compared with the first one's.

    Args:
        names: all methods, in the order of the report.
        chosen: requested names. Default: hf-generate and plain if they are measured, else the first method.

    Raises:
        FsdError: a chosen name is not measured.
    """
    missing = [name for name in chosen if name not in names]
    if missing:
        raise FsdError(f"baseline {missing[0]!r} is not among the methods: {', '.join(names)}.")
    usual = [name for name in ("hf-generate", "plain") if name in names]
    return list(dict.fromkeys(chosen)) or usual or [names[0]]


def _same(own: list[int] | None, other: list[int] | None) -> float | None:
    return None if own is None or other is None else float(own == other)


def _cells(name: str, comparisons: Sequence[Comparison], blocks: Mapping[int, int] | None = None) -> dict[int, Cell]:
    """Return the method's speeds by unit."""
    units: dict[int, dict[int, list[TimedRun]]] = {}
    for comparison in comparisons:
        unit = comparison.group if blocks is None else blocks[comparison.group]
        units.setdefault(unit, {}).setdefault(comparison.repeat, []).append(comparison.runs[name])
    cells = {}
    for unit, repeats in units.items():
        speeds = [_speeds(runs) for runs in repeats.values()]
        cells[unit] = {quantity: _median([speed[quantity] for speed in speeds]) for quantity in speeds[0]}
    return cells


def _speeds(runs: Sequence[TimedRun]) -> Cell:
    """Return the speeds of one repeat of a unit. Seconds are means per call."""
    lengths = [answer.length for run in runs for answer in run.answers]
    seconds, prefill = sum(run.seconds for run in runs), sum(run.prefill_seconds for run in runs)
    decoded, decoding = sum(max(length - 1, 0) for length in lengths), seconds - prefill  # an answer may be empty
    return {
        "seconds": seconds / len(runs),
        "prefill_seconds": prefill / len(runs),
        "decode_seconds": decoding / len(runs),
        "seconds_per_answer": seconds / len(lengths),
        "tokens_per_second": sum(lengths) / seconds,
        "decode_tokens_per_second": decoded / decoding if decoded > 0 and decoding > 0 else None,
    }


def summary(name: str, comparisons: Sequence[Comparison], cells: Mapping[int, Cell] | None = None) -> dict[str, Any]:
    """Return the numbers of one method over these comparisons, with speeds from ``cells`` (default: one per group)."""
    groups = _cells(name, comparisons)
    units = list((groups if cells is None else cells).values())
    drafts = FirstChoiceStats.pooled(
        FirstChoiceStats(answer.regrets) for comparison in comparisons for answer in comparison.runs[name].answers
    )
    return {
        "answers": len({index for comparison in comparisons for index in comparison.prompts}),
        **{quantity: _median([cell[quantity] for cell in units]) for quantity in SPEEDS},
        "seconds_total": sum(cell["seconds"] or 0.0 for cell in groups.values()),
        **{quantity: pooled(name, comparisons, value) for quantity, value in QUANTITIES.items()},
        "drafts": drafts.summary() if drafts else None,
        "accepted_by_position": _by_position([a for comparison in comparisons for a in comparison.runs[name].answers]),
    }


def _by_position(answers: Sequence[MeasuredAnswer]) -> list[float] | None:
    measured = [(answer.accepted, answer.target_forwards or 0) for answer in answers if answer.accepted is not None]
    rounds = sum(forwards for _, forwards in measured)
    if not rounds:
        return None
    return [sum(column) / rounds for column in zip_longest(*(accepted for accepted, _ in measured), fillvalue=0)]


def _prompt_rows(
    prompts: Sequence[BenchPrompt], methods: Iterable[str], comparisons: Sequence[Comparison]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"id": p.id, "category": p.category, "where": p.where, "prompt_tokens": len(p.ids), "methods": {}}
        for p in prompts
    ]
    for comparison in sorted(comparisons, key=lambda comparison: (comparison.group, comparison.repeat)):
        for name in methods:
            run = comparison.runs[name]
            for index, answer in zip(comparison.prompts, run.answers, strict=True):
                rows[index]["methods"].setdefault(name, []).append(_answer_row(comparison, run, answer))
    return rows


def _answer_row(comparison: Comparison, run: TimedRun, answer: MeasuredAnswer) -> dict[str, Any]:
    """Return the figures of one repeat. Seconds are those of the whole batch."""
    return {
        "repeat": comparison.repeat,
        "batch": len(run.answers),
        "seconds": run.seconds,
        "prefill_seconds": run.prefill_seconds,
        "answer_tokens": answer.length,
        "tau": (answer.verified_tokens or 0) / answer.target_forwards if answer.target_forwards else None,
        "log_likelihood_per_token": answer.log_likelihood,
        **{name: getattr(answer, name) for name in OF_ANSWER},
        "final_answer": answer.final,
        "tokens_sha256": (
            None if answer.tokens is None else hashlib.sha256(repr(answer.tokens).encode()).hexdigest()[:8]
        ),
    }


def _phases(name: str, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return where the time of all runs went. Only the phases prefill, target and draft have a meaning here."""
    total: dict[str, float] = {}
    rounds = 0
    for comparison in comparisons:
        run = comparison.runs[name]
        for phase, seconds in run.phases.items():
            total[phase] = total.get(phase, 0.0) + seconds
        # rows of a batch share their rounds, and the longest-lived row took part in all of them
        rounds += max((answer.target_forwards or 0 for answer in run.answers), default=0)
    whole = sum(total.values())
    after_prefill = {phase: seconds for phase, seconds in total.items() if phase != "prefill"}
    loop_seconds = sum(after_prefill.values())
    models = after_prefill.get("target", 0.0) + after_prefill.get("draft", 0.0)
    return {
        "phases": total,
        "phase_fractions": {phase: seconds / whole for phase, seconds in total.items()} if whole else {},
        "milliseconds_per_round": (
            {phase: 1000 * seconds / rounds for phase, seconds in after_prefill.items()} if rounds else {}
        ),
        "round_overhead_fraction": 1 - models / loop_seconds if loop_seconds else None,
    }


def _first_tokens(name: str, comparisons: Sequence[Comparison]) -> dict[int, list[int] | None]:
    """Return each prompt's tokens in the first repeat."""
    return {
        index: answer.tokens
        for comparison in comparisons
        if comparison.repeat == 0
        for index, answer in zip(comparison.prompts, comparison.runs[name].answers, strict=True)
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record atomically as indented JSON with a line per prompt, or per entry of any other long list.

    A file holds summaries: a hash of each answer's tokens, and numbers to six digits.
    """
    text = json.dumps(_summarised(jsonable(record)), indent=1)
    write_text(path, _DEEP.sub(lambda match: match[1] + json.dumps(json.loads(match[2])), text) + "\n")


def _summarised(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_summarised(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() >= {"id", "prompt_tokens", "methods"}:  # a prompt with its answers
        hashes = {name: runs[0]["tokens_sha256"] for name, runs in value["methods"].items()}
        return {key: value[key] for key in ("id", "category", "prompt_tokens")} | {"answers": hashes}
    return {key: _summarised(item) for key, item in value.items()}
