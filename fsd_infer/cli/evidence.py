"""The commands of `fsd-infer` that measure or forecast rules: sweep, calibrate and worth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fsd_infer.cli.commands import model_options, picked, set_threads, words
from fsd_infer.cli.run import needed
from fsd_infer.errors import FsdError
from fsd_infer.files import jsonable, usable_name, writable, write_json
from fsd_infer.registry import read_float


def sweep(args: argparse.Namespace) -> int:
    """Run `fsd-infer sweep`."""
    needed("scipy")
    from fsd_bench.evidence.page import write_page
    from fsd_bench.evidence.settings import SweepOptions
    from fsd_bench.evidence.sweep import sweep as run_sweep

    set_threads(args.threads)
    options = SweepOptions(
        temperatures=_temperatures(args.temperatures), **picked(args, "repeats examples"), **_sweep_options(args)
    )
    page = writable(args.html or Path(usable_name(args.output, "the sweep's file")).with_suffix(".html"), "the report")
    file = run_sweep(options, args.output, progress=True)
    write_page(file, page)
    print(f"answers: {file}\nreport: {page}", file=sys.stderr)
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Run `fsd-infer calibrate`."""
    needed("scipy")
    from fsd_bench.evidence.calibrate import NATS, SCORE, SPEED, Promise
    from fsd_bench.evidence.calibrate import calibrate as run_calibrate
    from fsd_bench.evidence.settings import SweepOptions
    from fsd_bench.report import calibration_lines

    bounds = {
        name: None if most is None else most / 100
        for name, most in (("copies", args.at_most_copies), ("repeats", args.at_most_repeats))
    }
    if args.at_most_score_loss is not None:
        promise = Promise(SCORE, args.at_most_score_loss / 100, **bounds)
    elif args.at_most_nats is not None:
        promise = Promise(NATS, args.at_most_nats, **bounds)
    else:
        promise = Promise(SPEED, args.at_least_speed, **bounds)
    set_threads(args.threads)
    options = SweepOptions(temperatures=[args.temperature], examples=4, **_sweep_options(args))
    record = run_calibrate(
        options, promise, args.output, confidence=args.confidence, verify=words(args.verify or ""), progress=True
    )
    print(calibration_lines(record))
    return 0


def worth(args: argparse.Namespace) -> int:
    """Run `fsd-infer worth`."""
    needed("scipy")
    from fsd_bench.worth.run import WorthOptions, worth_text
    from fsd_bench.worth.run import worth as run_worth

    record = None if args.json is None else writable(args.json, "the record")
    set_threads(args.threads)
    named = picked(args, "prompts temperature limit max_new_tokens raw seed")
    options = WorthOptions(rules=words(args.rules), **named, **model_options(args))
    found, facts = run_worth(options, progress=True)
    print(worth_text(found))
    if record is not None:
        write_json(record, jsonable(facts), indent=1)
        print(f"record: {record}", file=sys.stderr)
    return 0


def _sweep_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords that sweep and calibrate share."""
    files = {"prompts": words(args.prompts), "rules": words(args.rules)}
    return {**files, **model_options(args), **picked(args, "limit max_new_tokens seed score raw")}


def _temperatures(text: str) -> list[float]:
    values = [read_float(part) for part in words(text)]
    if None in values:
        raise FsdError(f"--temperatures needs comma-separated numbers such as 0,0.7, got {text!r}.")
    return values  # type: ignore[return-value]
