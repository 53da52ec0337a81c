"""What it costs a head to draft for another target than it was trained for: quantised weights, an adapter."""

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
from fsd_train.commands.feeding import at_step

if TYPE_CHECKING:
    from fsd_train.commands.doctor import Doctor

LOST = 0.01  # of agreement; less is no change


def trained_precision(head: str | Path) -> str | None:
    """The precision of the target that a head was trained for, "" for plain weights; None where it does not say."""
    facts = read_config(Path(head)).get("target")
    return str(facts.get("precision", "")) if isinstance(facts, dict) else None


def other_target(args: argparse.Namespace, target: Target) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the target that the head was trained for, if that is another and can be had."""
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


def says_precision(head: str | Path, target: Target) -> tuple[bool | None, str]:
    """Whether the head was trained for weights of the target's precision, in words."""
    trained, ours = trained_precision(head), target.precision or PLAIN
    if trained is None:
        return None, f"the head does not say what it was trained for; the target has {ours}"
    same = trained == target.precision
    return same or None, f"trained for {trained or PLAIN}" + ("" if same else f", used with {ours}")


def says_cost(mine: Doctor, other: Doctor) -> tuple[bool | None, str, str]:
    """Agreement with the target, beside that with the one that the head was trained for; and what to do."""
    steps = range(2)
    here, there = ([doctor.feeding.agreement(at_step(step)) for step in steps] for doctor in (mine, other))
    lost = there[0] - here[0]
    shown = [f"{a:.1%} ({b:.1%})" for a, b in zip(here, there, strict=True)]
    says = f"first and second drafts agree in {' and '.join(shown)}, in brackets with {other.target.name}"
    fix = "" if lost <= LOST else "train on from this head with this target: fsd-train fit --model.initial_head DIR"
    return (True if lost <= LOST else None), says, fix


def findings(args: argparse.Namespace, mine: Doctor, rows: Sequence[dict[str, Any]], make: Any) -> list[Any]:
    """Lines of doctor's table. ``make``: doctor's classes (Doctor, Finding)."""
    doctor, finding = make
    found = [finding("precision", *says_precision(args.head, mine.target))]
    named = other_target(args, mine.target)
    if named is not None:
        other = Target.from_pretrained(named[0], dtype=mine.target.dtype, **named[1])
        found.append(finding("what it costs", *says_cost(mine, doctor(other, mine.head, rows))))
    return found
