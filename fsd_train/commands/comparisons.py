"""Comparisons of doctor: with the target of the training (quantised weights, an adapter), and with a server."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from fsd_core.errors import FsdError
from fsd_core.openai_client import EXTENSIONS, UNSHAPED, Server
from fsd_infer.heads.formats import read_config
from fsd_infer.targets.adapters import base_of
from fsd_infer.targets.loading import adapter_of, is_builtin
from fsd_infer.targets.precision import PLAIN
from fsd_infer.targets.target import Target
from fsd_train.commands.export import options_of
from fsd_train.commands.feeding import Finding, at_step
from fsd_train.commands.head_checks import Doctor

LOST = 0.01  # loss of agreement that counts


def trained_precision(head: str | Path) -> str | None:
    """Return the precision of a head's training target, "" for plain weights, or None if unknown."""
    facts = read_config(Path(head)).get("target")
    return str(facts.get("precision", "")) if isinstance(facts, dict) else None


def other_target(args: argparse.Namespace, target: Target) -> tuple[str, dict[str, Any]] | None:
    """Return name and options of the head's training target if it differs and is available."""
    if args.trained_on is not None:
        return args.trained_on, {}
    target_kwargs = dict(args.target_kwargs or {})
    options = options_of(read_config(Path(args.head)))
    name = options.get("target")
    if isinstance(name, str) and (is_builtin(name) or os.path.isdir(name)):
        kwargs = dict(options.get("target_kwargs") or {})
        is_same = name == args.target or os.path.realpath(name) == os.path.realpath(args.target)
        return None if is_same and kwargs == target_kwargs else (name, kwargs)
    if target.precision and trained_precision(args.head) == "" and target_kwargs.pop("quantization_config", None):
        return args.target, target_kwargs
    adapter = adapter_of(args.target)
    return None if adapter is None else (base_of(adapter), target_kwargs)


def check_precision(head: str | Path, target: Target) -> Finding:
    """Check whether the head was trained for weights of the target's precision."""
    trained, ours = trained_precision(head), target.precision or PLAIN
    if trained is None:
        return Finding("precision", None, f"the head does not name its training target; this one has {ours}")
    is_same = trained == target.precision
    says = f"trained for {trained or PLAIN}" + ("" if is_same else f", used with {ours}")
    return Finding("precision", is_same or None, says)


def check_cost(ours: Doctor, theirs: Doctor) -> Finding:
    """Compare the agreement with this target to that with the training target."""
    steps = range(2)
    here, there = ([doctor.feeding.agreement(at_step(step)) for step in steps] for doctor in (ours, theirs))
    loss = there[0] - here[0]
    agreements = [f"{a:.1%} ({b:.1%})" for a, b in zip(here, there, strict=True)]
    says = f"first and second drafts agree in {' and '.join(agreements)}, in brackets with {theirs.target.name}"
    if loss <= LOST:
        return Finding("what it costs", True, says)
    fix = "continue the training with this target: fsd-train fit --model.initial_head DIR"
    return Finding("what it costs", None, says, fix)


def compare_targets(args: argparse.Namespace, doctor: Doctor, rows: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return the lines of doctor's table on the training target."""
    findings = [check_precision(args.head, doctor.target)]
    training_target = other_target(args, doctor.target)
    if training_target is not None:
        other = Target.from_pretrained(training_target[0], dtype=doctor.target.dtype, **training_target[1])
        findings.append(check_cost(doctor, type(doctor)(other, doctor.head, rows, doctor.max_length)))
    return findings


# with a server, for --url ---------------------------------------------------------------------------------------------

Counts = tuple[float, list[float]]  # drafts, accepted ones by position
_POSITION = re.compile(r'^vllm:spec_decode_num_accepted_tokens_per_pos(?:_total)?\{.*position="(\d+)".*\} (\S+)$', re.M)
_DRAFTS = re.compile(r"^vllm:spec_decode_num_drafts(?:_total)?(?:\{.*\})? (\S+)$", re.M)


def check_engine(
    server: Server, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], accepted: Sequence[float]
) -> list[Finding]:
    """Compare a server's answers to the same prompts with ours.

    Args:
        server: an OpenAI-compatible server, for acceptance with vLLM's metrics.
        prompts, answers: token ids of the prompts and of our greedy answers.
        accepted: our acceptance by position.
    """
    before = acceptance_counts(server.url)
    equal, without_ids = 0, 0
    try:
        model = server.models()[0]["id"]
        for prompt, answer in zip(prompts, answers, strict=True):
            body = {"model": model, "prompt": list(prompt), "max_tokens": len(answer), "temperature": 0.0, **UNSHAPED}
            ids = _ids(server.complete(body, EXTENSIONS))
            without_ids += ids is None
            equal += ids in (list(answer), list(answer[:-1]))  # some servers omit the end token
    except FsdError as error:
        return [Finding("engine", False, str(error).rstrip("."), "start the server, or omit --url")]
    return [
        _compare_answers(equal, without_ids, len(prompts)),
        _compare_acceptance(server.url, before, acceptance_counts(server.url), accepted),
    ]


def _compare_answers(equal: int, without_ids: int, total: int) -> Finding:
    check = "engine's answers"
    if without_ids:
        return Finding(check, None, f"{without_ids} of {total} came without token ids, so there is nothing to compare")
    fine = equal >= 0.8 * total  # rounding changes a few
    fix = "the server has another target, dtype or template: start it with this target"
    return Finding(check, fine, f"{equal} of {total} equal ours", fix)


def _compare_acceptance(url: str, before: Counts | None, after: Counts | None, ours: Sequence[float]) -> Finding:
    check = "engine's acceptance"
    if before is None or after is None:
        return Finding(check, None, f"{url} has no metrics of drafts by position")
    drafts = after[0] - before[0]
    if not drafts:
        return Finding(check, False, "the server drafted nothing", "start it with the head")
    theirs = [(late - early) / drafts for late, early in zip(after[1], before[1], strict=True)][: len(ours)]
    ours = ours[: len(theirs)]
    says = "accepted by position: " + " ".join(f"{value:.0%}" for value in theirs)
    says += "; ours " + " ".join(f"{value:.0%}" for value in ours)
    noise = max(0.1, 3 * math.sqrt(0.5 / drafts))
    fine = not any(abs(a - b) > noise for a, b in zip(theirs, ours, strict=True))
    fix = "the server feeds the head differently: compare layer ids, norm flags and the exported config with this table"
    return Finding(check, fine, says, fix)


def acceptance_counts(url: str) -> Counts | None:
    """Read the number of drafts and of accepted ones by position from vLLM's metrics; None without them."""
    parts = urlsplit(url)
    try:
        text = requests.get(f"{parts.scheme}://{parts.netloc}/metrics", timeout=10).text
    except requests.RequestException:
        return None
    drafts, by_position = _DRAFTS.findall(text), _POSITION.findall(text)
    if not drafts or not by_position:
        return None
    counts = [0.0] * (1 + max(int(position) for position, _ in by_position))
    for position, count in by_position:
        counts[int(position)] += float(count)
    return sum(map(float, drafts)), counts


def _ids(reply: object) -> list[int] | None:
    try:
        return list(reply["choices"][0]["token_ids"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return None
