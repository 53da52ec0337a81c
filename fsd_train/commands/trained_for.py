"""The loss of agreement if a head drafts for another target than in training: quantised weights, an adapter."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsd_infer.heads.formats import read_config
from fsd_infer.targets.adapters import base_of
from fsd_infer.targets.loading import adapter_of, is_builtin
from fsd_infer.targets.precision import PLAIN
from fsd_infer.targets.target import Target
from fsd_train.commands.feeding import Finding, at_step

if TYPE_CHECKING:
    from fsd_train.commands.doctor import Doctor

LOST = 0.01  # loss of agreement that counts


def trained_precision(head: str | Path) -> str | None:
    """Return the precision of a head's training target, "" for plain weights, or None if unknown."""
    facts = read_config(Path(head)).get("target")
    return str(facts.get("precision", "")) if isinstance(facts, dict) else None


def other_target(args: argparse.Namespace, target: Target) -> tuple[str, dict[str, Any]] | None:
    """Return name and options of the head's training target if it differs and is available."""
    if args.trained_on is not None:
        return args.trained_on, {}
    given = dict(args.target_kwargs or {})
    training = read_config(Path(args.head)).get("training")
    found = training.get("hyperparameters") if isinstance(training, dict) else None
    options: dict[str, Any] = found if isinstance(found, dict) else {}
    name = options.get("target")
    if isinstance(name, str) and (is_builtin(name) or os.path.isdir(name)):
        kwargs = dict(options.get("target_kwargs") or {})
        same = name == args.target or os.path.realpath(name) == os.path.realpath(args.target)
        return None if same and kwargs == given else (name, kwargs)
    if target.precision and trained_precision(args.head) == "" and given.pop("quantization_config", None):
        return args.target, given
    adapter = adapter_of(args.target)
    return None if adapter is None else (base_of(adapter), given)


def check_precision(head: str | Path, target: Target) -> Finding:
    """Check whether the head was trained for weights of the target's precision."""
    trained, ours = trained_precision(head), target.precision or PLAIN
    if trained is None:
        return Finding("precision", None, f"the head does not name its training target; this one has {ours}")
    same = trained == target.precision
    says = f"trained for {trained or PLAIN}" + ("" if same else f", used with {ours}")
    return Finding("precision", same or None, says)


def check_cost(mine: Doctor, other: Doctor) -> Finding:
    """Compare the agreement with this target to that with the training target."""
    steps = range(2)
    here, there = ([doctor.feeding.agreement(at_step(step)) for step in steps] for doctor in (mine, other))
    lost = there[0] - here[0]
    shown = [f"{a:.1%} ({b:.1%})" for a, b in zip(here, there, strict=True)]
    says = f"first and second drafts agree in {' and '.join(shown)}, in brackets with {other.target.name}"
    if lost <= LOST:
        return Finding("what it costs", True, says)
    fix = "continue the training with this target: fsd-train fit --model.initial_head DIR"
    return Finding("what it costs", None, says, fix)


def findings(args: argparse.Namespace, mine: Doctor, rows: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return the lines of doctor's table on the training target."""
    found = [check_precision(args.head, mine.target)]
    named = other_target(args, mine.target)
    if named is not None:
        other = Target.from_pretrained(named[0], dtype=mine.target.dtype, **named[1])
        found.append(check_cost(mine, type(mine)(other, mine.head, rows, mine.max_length)))
    return found
