"""`fsd-train doctor`: a table of reasons why a head accepts less than it should.

The usual cause ("fine in training, acceptance length 1 in the engine") is a difference between training and decoding
inputs. Doctor tries each known difference. If the head agrees clearly better with the target on other layers than its
config names, for example, the table reports that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fsd_core.errors import FsdError
from fsd_core.files import write_json
from fsd_core.locks import reserved
from fsd_core.openai_client import Server
from fsd_core.text.conversations import row_questions
from fsd_core.text.row_check import RowCheck, listing_of
from fsd_core.text.rows import read_rows
from fsd_infer.heads.head import EagleHead
from fsd_infer.targets.placing import parse_dtype
from fsd_infer.targets.target import Target
from fsd_train.commands.comparisons import check_engine, compare_targets
from fsd_train.commands.feeding import Finding
from fsd_train.commands.head_checks import Doctor, refuse_images
from fsd_train.commands.mtp_checks import MtpDoctor, check_files, mtp_place, refuse_other_options
from fsd_train.data.answers import conclude
from fsd_train.data.row_encoding import check_id, encode_row


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train doctor`. The exit status is 1 if a check fails."""
    with reserved(args.json, "the findings' file", args.overwrite) as record:
        return _report(_run_checks(args), record)


def _run_checks(args: argparse.Namespace) -> list[Finding]:
    """Return what the checks that the options ask for find."""
    dtype = parse_dtype(args.dtype)
    server = Server(args.url) if args.url else None
    if args.head is None and args.overfit is None:
        raise FsdError("doctor needs a head: --head DIR, or --overfit to train one on a single answer.")
    target = Target.from_pretrained(args.target, dtype=torch.float32, **(args.target_kwargs or {}))
    if args.overfit is not None:
        from fsd_train.commands.overfit import overfit

        return overfit(args, target)
    findings, doctor = _load_head(args, target)
    if doctor is None:
        return findings
    if args.features:
        findings.append(doctor.check_cache(args.features))
    findings += [*doctor.check_feeding(), doctor.check_dtype(dtype or torch.bfloat16), doctor.check_positions()]
    decoding, accepted, answers = doctor.decoded(args.rows, args.max_new_tokens)
    findings += decoding
    if server is not None:
        prompts = [row.prompt() for row in doctor.rows[: args.rows]]
        findings += check_engine(server, prompts, answers, accepted)
    return findings


def _load_head(args: argparse.Namespace, target: Target) -> tuple[list[Finding], Doctor | None]:
    """Load the head. Return the first findings, and what makes the others; None: the head cannot run."""
    is_mtp, directory = mtp_place(args.head)
    if not is_mtp:
        head = EagleHead.from_pretrained(args.head, target, dtype=torch.float32)
        rows = some_rows(args, target)
        doctor = Doctor(target, head, rows, args.max_length)
        return [*doctor.check_rows(), *compare_targets(args, doctor, rows)], doctor
    refuse_other_options(args)
    findings, layers = check_files(target, directory)
    if layers is None:
        return findings, None
    doctor = MtpDoctor(target, layers, some_rows(args, target), args.max_length)
    return [*findings, *doctor.check_rows()], doctor


def _report(findings: Sequence[Finding], record: Path | None) -> int:
    """Print the table, write the findings, and return the exit status."""
    print(show(findings))
    if record is not None:
        write_json(record, [asdict(finding) for finding in findings], indent=2)
    return 1 if any(finding.ok is False for finding in findings) else 0


def some_rows(args: argparse.Namespace, target: Target) -> list[dict[str, Any]]:
    """Return the first ``args.rows`` usable rows of up to ``args.max_length`` tokens."""
    check = RowCheck(args.strict)

    def usable() -> Iterator[dict[str, Any]]:
        for row in read_rows(args.data, check):
            shortest = args.max_length + 1
            with check.using(row.where, row.values):
                refuse_images(row.values)
                sequences = encode_row(row.values, target.tokenizer, row.where)
                check_id(max(max(ids) for ids, _ in sequences), row.where, target.vocab_size)
                shortest = min(len(ids) for ids, _ in sequences)
                row_questions(row.values, row.where)  # compared with the ids in the same row
            if shortest <= args.max_length:
                yield row.values

    rows = check.first(usable(), args.rows)
    conclude(check, target.tokenizer, listing_of(args.json))
    return rows


def show(findings: Sequence[Finding]) -> str:
    """Format the table."""
    words, width = {True: "ok", False: "WRONG", None: "-"}, max(len(finding.check) for finding in findings)
    lines = [f"{'check':{width}}  {'':5}  found"]
    for finding in findings:
        fix = f". Fix: {finding.fix}" if finding.fix else ""
        lines.append(f"{finding.check:{width}}  {words[finding.ok]:5}  {finding.says}{fix}")
    return "\n".join(lines)
