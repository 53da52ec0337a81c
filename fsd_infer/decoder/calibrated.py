"""The setting behind ``rule="calibrated"``: a rule and a tree beside the drafter, with the promise that they keep."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_core.errors import CheckpointError, FsdError
from fsd_core.files import read_json, writable, write_json
from fsd_infer.drafters import Drafter, TreeShape
from fsd_infer.drafters.growth import TreeDrafter
from fsd_infer.rules import Rule, parse_rule
from fsd_infer.targets.target import Target

CALIBRATED = "calibrated"
FILE = "calibrated.json"
_ADVICE = "Delete it and calibrate again with `fsd-bench calibrate`."


@dataclass(frozen=True)
class Calibrated:
    """A calibrated setting.

    Attributes:
        temperature: of the measurement; 0 is greedy.
        rule: as text.
        tree: of the drafter; None for its default.
        promise: {"kind", "value"}.
        evidence: data and results of calibration and verification.
    """

    temperature: float
    rule: str
    tree: TreeShape | None
    promise: dict[str, Any]
    evidence: dict[str, Any]


def check_calibrated(directory: Path) -> None:
    """Raise, before any measurement, the errors that :func:`write_calibrated` would raise."""
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
    own = {"target": target.weights_digest(), **asdict(setting)}
    same = ("target", "temperature")
    entries = [entry for entry in entries if any(entry.get(key) != own[key] for key in same)]
    try:
        write_json(file, {"version": 1, "settings": [*entries, own]}, indent=1)
    except OSError as error:
        raise FsdError(f"{file} cannot be written ({error.strerror or error}): copy the drafter elsewhere.") from error
    return file


def calibrated(drafter: Drafter, target: Target, temperature: float) -> tuple[Rule, Drafter]:
    """Return the calibrated rule for this target and temperature, and the drafter with the calibrated tree.

    Raises:
        FsdError: a drafter without a directory, or no setting for this target and temperature.
        CheckpointError: the file is damaged.
    """
    if drafter.directory is None:
        raise FsdError(f"rule 'calibrated' is read beside a drafter's files, but {drafter.name} has none: name a rule.")
    file = drafter.directory / FILE
    if not file.exists():
        raise FsdError(f"{file}: nothing was calibrated yet. Run `fsd-bench calibrate`, or name a rule.")
    entries = [entry for entry in _entries(file) if entry.get("target") == target.weights_digest()]
    known = [entry["temperature"] for entry in entries]
    if temperature not in known:
        there = ", ".join(f"{value:g}" for value in sorted(known)) or "none for this target"
        raise FsdError(f"{file}: nothing was calibrated for temperature {temperature:g} (there is: {there}).")
    entry = entries[known.index(temperature)]
    try:
        rule, tree = parse_rule(entry["rule"]), entry["tree"]
        shape = None if tree is None else TreeShape(**tree)
    except (KeyError, TypeError, FsdError) as error:
        raise CheckpointError(f"{file}: damaged ({error}). {_ADVICE}") from error
    if shape is not None and isinstance(drafter, TreeDrafter):
        drafter = drafter.reshaped(shape)
    return rule, drafter


def _entries(file: Path) -> list[dict[str, Any]]:
    content = read_json(file, _ADVICE, CheckpointError)
    entries = content.get("settings") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("temperature"), (int, float)) for entry in entries
    ):
        raise CheckpointError(f"{file}: expected a list of settings. {_ADVICE}")
    return entries
