"""Calibrated settings in a drafter's directory: ``rule="calibrated"``, and one number for quality.

A quality is the share of exact's score that answers keep: 1 is exact, ``quality:0.95`` the fastest rule that
calibration certified to keep 95 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsd_core.errors import CheckpointError, FsdError
from fsd_core.files import read_json, writable, write_json
from fsd_core.registry import read_float
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.drafters.tree_drafter import TreeDrafter
from fsd_infer.rules import Exact, Rule, RuleLike, parse_rule
from fsd_infer.targets.builtin import SHIPPED
from fsd_infer.targets.target import Target

CALIBRATED = "calibrated"
QUALITY = "quality:"  # begins the text of a rule
FILE = "calibrated.json"
_ADVICE = "Delete it and calibrate again with `fsd-bench calibrate`."


@dataclass(frozen=True)
class Calibrated:
    """A calibrated setting.

    Attributes:
        temperature: temperature of the measurement; 0 is greedy.
        rule: the rule as text.
        tree: shape of the drafter's trees; None for its default.
        promise: {"kind", "value"}.
        inputs: data and results of calibration and verification.
        levels: by falling quality, the fastest certified rule as {"quality", "rule", "speed"}; speed is times exact's.
    """

    temperature: float
    rule: str
    tree: TreeShape | None
    promise: dict[str, Any]
    inputs: dict[str, Any]
    levels: list[dict[str, Any]] = field(default_factory=list)


def check_calibrated(directory: Path) -> None:
    """Raise, before any measurement, the errors of a file that :func:`write_calibrated` cannot write.

    Also for a shipped head: a file in the package holds for every user, and the next installation replaces it.
    """
    if SHIPPED.resolve() in directory.resolve().parents:
        raise FsdError(
            f"{directory} is a part of the installed package, and the setting would be written into it: copy the head "
            f"(cp -r {directory} my-head), and name the copy (--drafter my-head)."
        )
    if writable(directory / FILE, "the drafter's file").exists():
        _entries(directory / FILE)


def write_calibrated(directory: Path, target: Target, setting: Calibrated) -> Path:
    """Add a setting to the drafter's file; it replaces one of the same target and temperature.

    Raises:
        FsdError: the directory cannot be written.
        CheckpointError: the file there is damaged.
    """
    file = directory / FILE
    entries = _entries(file) if file.exists() else []
    new = {"target": target.weights_digest(), **asdict(setting)}
    keys = ("target", "temperature")
    entries = [entry for entry in entries if any(entry.get(key) != new[key] for key in keys)]
    try:
        write_json(file, {"version": 1, "settings": [*entries, new]}, indent=1)
    except OSError as error:
        raise FsdError(f"{file} cannot be written ({error.strerror or error}): copy the drafter elsewhere.") from error
    return file


def calibrated(drafter: Drafter, target: Target, temperature: float) -> tuple[Rule, Drafter]:
    """Return the calibrated rule for this target and temperature, and the drafter with the calibrated tree.

    Raises:
        FsdError: a drafter without a directory, or no setting for this target and temperature.
        CheckpointError: the file is damaged.
    """
    file, entry = _entry(drafter, target, temperature)
    try:
        rule, tree = parse_rule(entry["rule"]), entry["tree"]
        shape = None if tree is None else TreeShape(**tree)
    except (KeyError, TypeError, FsdError) as error:
        raise CheckpointError(f"{file}: damaged ({error}). {_ADVICE}") from error
    if shape is not None and isinstance(drafter, TreeDrafter):
        drafter = drafter.with_shape(shape)
    return rule, drafter


def with_quality(rule: RuleLike, quality: float | None) -> RuleLike:
    """Return the rule of a request that may name a quality instead. Raises FsdError if it names both."""
    if quality is None:
        return rule
    if rule != "exact":
        raise FsdError(f"quality chooses the rule: leave out quality, or the rule {rule!r:.60}.")
    return f"{QUALITY}{quality}"


def resolved(rule: RuleLike, drafter: Drafter, target: Target, temperature: float) -> RuleLike:
    """Return ``rule`` with a rule of the calibration file in place of each ``quality:Q``.

    A file without a rule that keeps the quality gives ``exact``, which keeps every one.

    Raises:
        FsdError: Q is not above 0 and at most 1, or below 1 as :func:`calibrated`.
        CheckpointError: the file is damaged.
    """
    if isinstance(rule, Sequence) and not isinstance(rule, str):
        return [parse_rule(resolved(one, drafter, target, temperature)) for one in rule]  # type: ignore[arg-type]
    if not isinstance(rule, str) or not rule.startswith(QUALITY):
        return rule
    quality = read_float(rule.removeprefix(QUALITY))
    if quality is None or not 0 < quality <= 1:
        raise FsdError(f"rule {rule!r:.60}: quality is above 0 and at most 1, which is exact.")
    if quality == 1:
        return Exact()
    file, entry = _entry(drafter, target, temperature)
    try:
        kept = [level for level in entry.get("levels", []) if level["quality"] >= quality]
        return parse_rule(max(kept, key=lambda level: level["speed"])["rule"]) if kept else Exact()
    except (KeyError, TypeError, FsdError) as error:
        raise CheckpointError(f"{file}: damaged ({error}). {_ADVICE}") from error


def _entry(drafter: Drafter, target: Target, temperature: float) -> tuple[Path, dict[str, Any]]:
    """Return a drafter's file, and its entry for this target and temperature. Raises as :func:`calibrated`."""
    if drafter.directory is None:
        raise FsdError(f"calibration is read from a drafter's directory, but {drafter.name} has none: name a rule.")
    file = drafter.directory / FILE
    if not file.exists():
        raise FsdError(f"{file}: nothing was calibrated yet. Run `fsd-bench calibrate`, or name a rule.")
    entries = [entry for entry in _entries(file) if entry.get("target") == target.weights_digest()]
    known = [entry["temperature"] for entry in entries]
    if temperature not in known:
        available = ", ".join(f"{value:g}" for value in sorted(known)) or "none for this target"
        raise FsdError(f"{file}: nothing was calibrated for temperature {temperature:g} (there is: {available}).")
    return file, entries[known.index(temperature)]


def _entries(file: Path) -> list[dict[str, Any]]:
    content = read_json(file, _ADVICE, CheckpointError)
    entries = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("temperature"), (int, float)) for entry in entries
    ):
        raise CheckpointError(f"{file}: expected a list of settings. {_ADVICE}")
    return entries
