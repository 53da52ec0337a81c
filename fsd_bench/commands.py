"""The commands of `fsd-bench`. Each takes parsed options and returns a status; it imports only what it uses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsd_core.console import needed
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, shortened, usable_name, writable, write_json, write_text
from fsd_core.locks import reserved
from fsd_core.options import picked, set_threads, words
from fsd_core.registry import read_float


def run(args: argparse.Namespace) -> int:
    """Run `fsd-bench run`."""
    import fsd_bench
    from fsd_bench.report import bench_table
    from fsd_infer.decoder.config import model_options

    if args.resume and args.json is None:
        raise FsdError("--resume continues the unfinished run of a record: name it with --json FILE.")
    names = (
        "limit every max_new_tokens temperature repeat seed batch_size threads log_likelihood score isolate raw "
        "strict resume overwrite layout run_code turns"
    )
    record = fsd_bench.run(
        args.prompts, words(args.methods), json_path=args.json, progress=True, warmup=not args.no_warmup,
        baselines=words(args.baseline or ""), fields=_named_fields(args.field), **model_options(args),
        **picked(args, names),
    )  # fmt: skip
    print(bench_table(record))
    if args.json:
        print(f"record: {args.json}", file=sys.stderr)
    return 0


def _named_fields(texts: Sequence[str] | None) -> dict[str, str] | None:
    """Return {our name: the file's} of ``NAME=FIELD`` texts. Raises FsdError for other texts."""
    fields = {}
    for text in texts or ():
        ours, _, theirs = text.partition("=")
        if not ours or not theirs:
            raise FsdError(f"--field {text}: write NAME=FIELD, such as prompt=Question.")
        fields[ours] = theirs
    return fields or None


def _check_apart(files: Sequence[Path]) -> None:
    """Raise FsdError if two of the files that a command writes are one, so that the later would replace the earlier."""
    places = [file.resolve() for file in files]
    for file, place in zip(files, places, strict=True):
        if places.count(place) > 1:
            raise FsdError(f"two results would go to {file}: give each a name of its own.")


def table(args: argparse.Namespace) -> int:
    """Run `fsd-bench table`."""
    from fsd_bench.table import field_table, markdown, measure_sets, parse_sets, specbundle
    from fsd_infer.decoder.config import model_options

    named = picked(args, "json markdown specbundle")
    files = {name: path and writable(path, "the table", args.overwrite) for name, path in named.items()}
    sets = parse_sets(words(args.sets))
    _check_apart([*(path for path in files.values() if path), *(Path(args.work, f"{name}.json") for name in sets)])
    set_threads(args.threads)
    names = "limit max_new_tokens temperature seed score raw strict every repeat batch_size layout run_code turns"
    records = measure_sets(
        sets, words(args.methods), args.work, progress=True, fields=_named_fields(args.field),
        **picked(args, names), **model_options(args),
    )  # fmt: skip
    fields = field_table(records)
    text = markdown(fields)
    print(text)
    if files["json"] is not None:
        write_json(files["json"], jsonable(fields), indent=1)
    if files["specbundle"] is not None:
        write_json(files["specbundle"], jsonable(specbundle(records)), indent=1)
    if files["markdown"] is not None:
        write_text(files["markdown"], text)
    return 0


def sweep(args: argparse.Namespace) -> int:
    """Run `fsd-bench sweep`."""
    needed("matplotlib")
    from fsd_bench.sweep.page import write_page
    from fsd_bench.sweep.runner import sweep as run_sweep
    from fsd_bench.sweep.settings import SweepOptions

    set_threads(args.threads)
    options = SweepOptions(
        temperatures=_temperatures(args.temperatures), **picked(args, "repeats examples"), **_sweep_options(args)
    )
    answers = writable(args.output, "the sweep's file")
    page = writable(args.html or answers.with_suffix(".html"), "the report", args.overwrite or answers.is_file())
    _check_apart([page, answers])
    file = run_sweep(options, args.output, progress=True)
    write_page(file, page)
    print(f"answers: {file}\nreport: {page}", file=sys.stderr)
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Run `fsd-bench calibrate`."""
    needed("scipy")
    needed("matplotlib")
    from fsd_bench.report import calibration_lines
    from fsd_bench.sweep.calibrate import calibrate as run_calibrate
    from fsd_bench.sweep.certify import NATS, SCORE, SPEED, Promise
    from fsd_bench.sweep.settings import SweepOptions

    bounds = {
        name: None if points is None else points / 100
        for name, points in (("copies", args.at_most_copies), ("repeats", args.at_most_repeats))
    }
    promises = ((SCORE, args.at_most_score_loss, 100), (NATS, args.at_most_nats, 1), (SPEED, args.at_least_speed, 1))
    (promise,) = (Promise(kind, value / unit, **bounds) for kind, value, unit in promises if value is not None)
    set_threads(args.threads)
    options = SweepOptions(temperatures=[args.temperature], examples=4, **_sweep_options(args))
    record = run_calibrate(
        options, promise, args.output, confidence=args.confidence, verify=words(args.verify or ""), progress=True
    )
    print(calibration_lines(record))
    return 0


def worth(args: argparse.Namespace) -> int:
    """Run `fsd-bench worth`."""
    from fsd_bench.worth.run import WorthOptions, brief_text, worth_text
    from fsd_bench.worth.run import worth as run_worth
    from fsd_infer.decoder.config import model_options

    set_threads(args.threads)
    named = picked(args, "prompts temperature limit max_new_tokens raw seed strict")
    options = WorthOptions(rules=words(args.rules), **named, **model_options(args))
    with reserved(args.json, "the record", args.overwrite) as record:
        partial = None if record is None else record.with_name(f"{shortened(record.name)}.partial.json")
        if args.overwrite and partial is not None:
            partial.unlink(missing_ok=True)
        result, facts = run_worth(options, progress=True, kept=partial)
        print(worth_text(result) if args.details else brief_text(result, options))
        if record is not None and partial is not None:
            write_json(record, jsonable(facts), indent=1)
            partial.unlink(missing_ok=True)
            print(f"record: {record}", file=sys.stderr)
    return 0


def estimate(args: argparse.Namespace) -> int:
    """Run `fsd-bench estimate`."""
    from fsd_bench.estimate import Planned, head_on_paper, lm_on_paper, planned_head
    from fsd_bench.planned import planned_target, read_changes
    from fsd_bench.report import estimate_text
    from fsd_infer.heads.head import EagleHead
    from fsd_infer.heads.hub import find_head
    from fsd_infer.trees.shape import BONUS_SHAPES, DEFAULT_SHAPES, TreeShape

    if args.tree == "auto":
        raise FsdError("--tree auto has no shape to estimate: give DEPTH,WIDTH,NODES.")
    tree = None if args.tree is None else TreeShape.parse(args.tree)
    target = planned_target(args.target, read_changes(args.set))
    request: dict[str, Any] = dict(
        batch=args.batch_size, context=args.context, new=args.max_new_tokens, graphs=args.cuda_graphs
    )
    if args.drafter is not None and find_head(args.drafter) is None:
        try:
            drafter = lm_on_paper(target, args.drafter)
        except FsdError as error:  # in the words of targets
            raise FsdError(f"--drafter is neither a head nor a small LM: {error}") from error
    elif args.drafter is not None:
        head = EagleHead.from_pretrained(args.drafter)
        drafter, width = head_on_paper(target, head), head.config.target_hidden_size
        if width != target.hidden_size:
            raise FsdError(
                f"{args.drafter} reads features of width {width}, but {args.target} has {target.hidden_size}: name the "
                "target that this head was trained for."
            )
    else:
        if args.draft_vocab is not None and args.draft_vocab > target.vocab_size:
            raise FsdError(f"--draft-vocab: {args.target} has {target.vocab_size} tokens: give no more.")
        vocabulary = args.draft_vocab or min(32_000, target.vocab_size)
        drafter = head_on_paper(target, planned_head(target, layout=args.layout, draft_vocab_size=vocabulary))
    planned = Planned(target, drafter, **request)
    print(estimate_text(planned, tree or DEFAULT_SHAPES["cuda"], tree or BONUS_SHAPES["cuda"]))
    return 0


def skip_layers(args: argparse.Namespace) -> int:
    """Run `fsd-bench skip-layers`."""
    from fsd_bench.skip_layers import answers, search
    from fsd_infer.decoder import FuzzyDecoder
    from fsd_infer.drafters.from_target import spelled
    from fsd_infer.targets.placing import parse_device, parse_dtype

    set_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(args.target, dtype=parse_dtype(args.dtype), device=parse_device(args.device))
    texts = answers(decoder, args.prompts, args.limit, args.max_new_tokens, args.strict)
    for step in search(decoder.target, texts, args.layers):
        print(f"{len(step.layers)} layers, agreement {step.agreement:.3f}: {spelled(step.layers)}", flush=True)
    return 0


def board(args: argparse.Namespace) -> int:
    """Run `fsd-bench board`."""
    from fsd_bench.board import write_board

    page = writable(args.output, "the board", args.overwrite)
    rows = write_board([Path(usable_name(name, "a record")) for name in args.records], page, args.title)
    print(f"board of {rows} rows: {page}")
    return 0


def _sweep_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords that sweep and calibrate share."""
    from fsd_infer.decoder.config import model_options

    files = {"prompts": words(args.prompts), "rules": words(args.rules)}
    return {**files, **model_options(args), **picked(args, "limit max_new_tokens batch_size seed score raw strict")}


def _temperatures(text: str) -> list[float]:
    values = [read_float(part) for part in words(text)]
    if None in values:
        raise FsdError(f"--temperatures needs comma-separated numbers such as 0,0.7, got {text!r}.")
    return values  # type: ignore[return-value]
