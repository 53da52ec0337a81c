"""Choose a setting that keeps a promise: measure candidates, certify those that keep it, verify the best one.

Candidates of one list (``fuzzy:js:0.1/0.2/0.4``) are tested in order, from careful to bold, and the first that fails
ends the list. With F lists each test has the level (1 - confidence) / F. So any setting that breaks the promise is
certified with a probability of at most 1 - confidence, and the fastest certified setting may be picked freely. This is
fixed-sequence testing with a Bonferroni correction over lists (Angelopoulos et al., Learn then Test, 2021).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fsd_bench.base import Comparison
from fsd_bench.prompts import without_copies
from fsd_bench.score import read_references
from fsd_bench.sweep.candidates import AUTO, forecast_rules
from fsd_bench.sweep.certify import NATS, SCORE, SPEED, Promise, certify, check, quality_levels
from fsd_bench.sweep.page import write_page
from fsd_bench.sweep.runner import read_sweep, sweep
from fsd_bench.sweep.settings import EXACT, Setting, SweepOptions
from fsd_bench.sweep.summary import summarise
from fsd_core.errors import DataError, FsdError
from fsd_core.files import jsonable, read_json, usable_name, writable, write_json
from fsd_core.text.encoding import PromptRow
from fsd_infer.decoder.calibrated import Calibrated, check_calibrated, write_calibrated
from fsd_infer.environment import environment
from fsd_infer.targets.target import Target

RECORD = "record.json"  # in the output's folder


def calibrate(
    options: SweepOptions, promise: Promise, output: str | Path, *, confidence: float = 0.9,
    verify: Sequence[str | Path] = (), progress: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Find a setting, verify it, and write it to the drafter's directory, see :mod:`fsd_infer.decoder.calibrated`.

    Args:
        options: prompts, candidates (lists from careful to bold, or only "auto", see :mod:`.candidates`) and one
            temperature. A promise of score uses only prompts with a reference.
        promise: what the setting must keep.
        output: folder for the sweeps of both sets (``calibration.jsonl``, ``verification.jsonl``), from which a killed
            run continues, their reports, and ``record.json``.
        confidence: least probability that the promise holds for prompts like these.
        verify: files of prompts to verify on. Default: half of the prompts, chosen by their text.
        progress: show progress bars.

    Returns:
        The record: ``setting``, ``promise``, ``certified``, ``calibration``, ``verification``, ``levels``,
        ``candidates``, ``options``, ``environment``, ``file``.

    Raises:
        FsdError: invalid options, a file in the folder that no calibration wrote, no candidate that reaches a promised
            speed, a drafter without a directory, or whatever :func:`.sweep` raises.
        DataError: a side without prompts, a prompt on both sides, or no reference for a promise of score.
    """
    _check(options, confidence)
    folder_name = _folder(output)
    directory, target = _home(options)
    calibration, verification = split(options, verify, needs_score=promise.kind == SCORE, folder=folder_name)
    options = _with_candidates(options, promise, progress)
    folder = writable(folder_name / RECORD, "the record").parent
    comparisons = _sweep(options, calibration, folder / "calibration.jsonl", progress)
    settings = options.settings()
    facts = summarise(comparisons, [setting.name for setting in settings], options.seed)
    certified = certify(comparisons, settings, promise, confidence, options.seed)
    chosen = _choose(settings, certified, facts, promise)
    evidence = {
        "confidence": confidence,
        "calibration": check(comparisons, chosen.name, promise, options.seed),
        "verification": _verified(options, chosen, promise, verification, folder / "verification.jsonl", progress),
    }
    levels = quality_levels(comparisons, settings, facts, promise, confidence, options.seed)
    file = write_calibrated(directory, target, _stored(options, chosen, promise, evidence, levels))
    record = {
        "promise": {**asdict(promise), "text": promise.text()},
        "setting": chosen.name,
        "certified": certified,
        **evidence,
        "levels": levels,
        "candidates": facts,
        "options": options.to_dict(),
        "environment": environment(),
        "file": str(file),
    }
    write_json(folder / RECORD, jsonable(record), indent=1)
    return record


def _folder(output: str | Path) -> Path:
    """Return the output's folder. Raises FsdError for files in it that no calibration wrote, but one would replace."""
    folder = Path(usable_name(output, "the output folder"))
    pages = [folder / f"{name}.html" for name in ("calibration", "verification")]
    foreign = [page for page in pages if page.exists() and not page.with_suffix(".jsonl").exists()]
    if (record := folder / RECORD).exists():
        calibration = read_json(record, "Give another folder.")
        foreign += [] if isinstance(calibration, dict) and calibration.keys() >= {"promise", "setting"} else [record]
    if foreign:
        raise FsdError(f"{foreign[0]} is of no calibration and is not overwritten: give another folder.")
    return folder


def _check(options: SweepOptions, confidence: float) -> None:
    if not 0.5 <= confidence < 1:
        raise FsdError(f"confidence must be at least 0.5 and below 1, got {confidence}.")
    if len(options.temperatures) != 1:
        raise FsdError("calibrate for one temperature at a time: a setting holds for the temperature it was tested at.")


def _verified(
    options: SweepOptions,
    chosen: Setting,
    promise: Promise,
    prompts: Sequence[PromptRow],
    file: Path,
    progress: bool,
) -> dict[str, Any]:
    """Check a setting on prompts that did not choose it; exact needs none."""
    if chosen.name == EXACT:
        return {"prompts": 0, "kept": True}
    comparisons = _sweep(replace(options, rules=[chosen.name]), prompts, file, progress)
    return check(comparisons, chosen.name, promise, options.seed)


def _stored(
    options: SweepOptions, chosen: Setting, promise: Promise, evidence: dict[str, Any], levels: list[dict[str, Any]]
) -> Calibrated:
    """Return what is written to the drafter's directory."""
    tree = chosen.tree or options.tree
    assert not isinstance(tree, str), "options.check() refuses it"
    stored_evidence = jsonable({**evidence, "prompts": options.to_dict()["prompts"]})
    rule = chosen.name.partition("@")[0]
    return Calibrated(float(options.temperatures[0]), rule, tree, asdict(promise), stored_evidence, levels)


def _with_candidates(options: SweepOptions, promise: Promise, progress: bool) -> SweepOptions:
    """Return the options with their candidates, each with the promised budget. Raises FsdError."""
    if list(options.rules) == [AUTO]:
        options = replace(options, rules=forecast_rules(options, progress))
    if promise.kind == NATS:
        options = replace(options, rules=[_with_budget(rule, promise.value) for rule in options.rules])
    options = replace(options, controls=False)
    options.check()
    return options


def _with_budget(rule: str, nats: float) -> str:
    """Return the rule with that budget."""
    if "budget" in rule:
        raise FsdError(f"rule {rule}: a promise of nats sets the budget itself, so leave the budget out.")
    text, at, tree = rule.partition("@")
    return text if text == EXACT else f"{text}:budget={nats:g}{at}{tree}"


def split(
    options: SweepOptions, verify: Sequence[str | Path], needs_score: bool, folder: Path | None = None
) -> tuple[list[PromptRow], list[PromptRow]]:
    """Return prompts to calibrate on and prompts to verify on, each text once. Raises as :func:`calibrate`.

    The tests take prompts for independent draws, which copies of a prompt are not.
    """
    rows = without_copies(options.read(None if folder is None else folder / "calibration"))
    if verify:
        rows_to_verify = replace(options, prompts=verify).read(None if folder is None else folder / "verification")
        halves = [rows, without_copies(rows_to_verify)]
        texts = {_text(row) for row in rows}
        repeated = next((row for row in halves[1] if _text(row) in texts), None)
        if repeated is not None:
            raise DataError(
                f"{repeated.file}:{repeated.line}: this prompt is among those to calibrate on. Verify on others."
            )
    else:
        halves = [[], []]
        for row in rows:  # by the text, so that a file of more prompts leaves each on its side
            halves[hashlib.sha256(_text(row).encode("utf-8", "surrogatepass")).digest()[0] % 2].append(row)
    if needs_score:
        halves = [
            [row for row, reference in zip(half, read_references(half, options.score)) if reference is not None]
            for half in halves
        ]
    for half, use in zip(halves, ("calibrate", "verify")):
        if not half:
            needed = "prompts with an `answer`" if needs_score else "prompts"
            raise DataError(f"no {needed} to {use} on: give more of them; copies count once.")
    return halves[0], halves[1]


def _text(row: PromptRow) -> str:
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in row.messages)


def _sweep(options: SweepOptions, rows: Sequence[PromptRow], file: Path, progress: bool) -> list[Comparison]:
    result = read_sweep(sweep(options, file, progress=progress, rows=rows))
    write_page(file, file.with_suffix(".html"))
    return result.at[0].comparisons


def _choose(
    settings: Sequence[Setting], certified: Sequence[dict[str, Any]], facts: dict[str, dict[str, Any]], promise: Promise
) -> Setting:
    """Return the fastest certified setting; for a promise of speed the one with the best score or fewest nats."""
    if not certified:
        best = max(entry["ratios"]["speed"]["ratio"] for entry in facts.values())
        raise FsdError(
            f"no candidate is certainly {promise.value:g} times as fast as exact; the best measured {best:.2f}. "
            "Add bolder candidates or deeper trees, promise less, or measure more prompts."
        )
    names = [entry["setting"] for entry in certified]

    def worth(name: str) -> float:
        if promise.kind != SPEED:
            return float(facts[name]["ratios"]["speed"]["ratio"])
        score = facts[name]["means"].get("score")
        return float(-facts[name]["divergence_spent"] if score is None else score["mean"])

    chosen = max(names, key=worth)
    return next(setting for setting in settings if setting.name == chosen)


def _home(options: SweepOptions) -> tuple[Path, Target]:
    """Return the drafter's directory and its target. Raises FsdError without a directory."""
    decoder = options.load(options.drafter, weights="plain")
    if decoder.drafter.directory is None:
        raise FsdError(f"drafter {decoder.drafter.name} has no directory to write a setting to: use a head or a model.")
    check_calibrated(decoder.drafter.directory)
    return decoder.drafter.directory, decoder.target
