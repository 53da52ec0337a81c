"""Run a benchmark: read prompts, let the methods answer them, write the record."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fsd_bench.base import Comparison, MeasuredAnswer, Method
from fsd_bench.jobs import RunSpec, Session, in_turns, rotated, run_jobs, turns_of
from fsd_bench.layouts import layout_of
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.methods import METHODS, Spec, make_methods, parse_methods
from fsd_bench.models import Models
from fsd_bench.process import ProcessMethod
from fsd_bench.prompts import category_of, encode_rows, first_rows, group_prompts, rows_digest
from fsd_bench.record import BenchPrompt, build_record, write_record
from fsd_bench.runs import RunFile, Trial, read_lines
from fsd_bench.score import Reference, measure, read_references
from fsd_bench.settings import Settings, set_threads
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, writable
from fsd_core.text.encoding import PromptRow
from fsd_infer.environment import environment
from fsd_infer.targets.target import Target


def run(
    prompts: str | Path,
    methods: Sequence[str],
    *,
    json_path: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    command: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure ``methods`` on ``prompts``.

    Args:
        prompts: file of prompts.
        methods: e.g. ["plain", "exact", "exact@heads/mine", "hf-generate", "vllm=server:http://localhost:8000"]; see
            :mod:`fsd_bench.methods`.
        json_path: file of the record, written atomically. Until then finished runs are kept beside it.
        resume: continue such an unfinished measurement.
        progress: show a progress bar.
        command: command line in the record; default: this process's.
        options: other fields of :class:`Settings`.

    Returns:
        The record: ``methods``, ``baseline``, ``ratios``, ``differences``, ``agreement``, ``prompts`` (see
        :func:`.build_record`), ``settings`` and ``environment``.

    Raises:
        FsdError: an unknown method, a malformed row, an unfinished run in the way, or whatever loading or decoding
            raises.
        ServerError: a server cannot be reached. Once decoding has begun, finished runs are kept.
    """
    settings = Settings(prompts, methods, **options)
    settings.check()
    set_threads(settings)
    models = Models(settings)
    encode = models.encoder(settings.raw)
    layout = layout_of(settings.layout, settings.fields)
    rows = first_rows(settings.prompts, encode, settings.limit, settings.every, settings.strict, json_path, layout)
    references = read_references(rows, settings.score, settings.run_code)
    unmeasured = ("baselines", "score", "strict", "run_code")
    measured = {key: value for key, value in settings.to_dict().items() if key not in unmeasured}
    path = None if json_path is None else partial_path(json_path, resume)
    groups = group_prompts([category_of(row) for row in rows], settings.batch_size)
    names = [spec.name for spec in parse_methods(methods)]
    jobs = in_turns(names, len(groups), {settings.temperature: settings.repeat})
    file = RunFile(
        path, "bench", jsonable({**measured, "rows_sha256": rows_digest(rows)}),
        {job: len(groups[job.group]) for job in jobs},
        advice=("the same command with --resume continues it", "delete the file"),
    )  # fmt: skip
    with file.kept():
        record = _measure(settings, models, rows, references, groups, jobs, file, progress)
    record["environment"] |= environment(command)
    record = jsonable(record)
    if path is not None:
        write_record(writable(json_path, "the record"), record)  # type: ignore[arg-type]
        path.unlink()
    return record


def partial_path(json_path: str | Path, resume: bool) -> Path:
    """Return where the runs of a record are kept until it is written.

    Raises:
        FsdError: another kind of file is in the way, an unfinished measurement without ``resume``, or a finished one
            with it.
    """
    final = writable(json_path, "the record")
    path = final.with_name(final.name + ".partial.jsonl")
    finished = final.exists() and final.stat().st_size > 0
    if finished and not _is_record(final):
        raise FsdError(f"{final} is no record of a benchmark and is not overwritten: give another name.")
    if finished and resume and not path.exists():
        raise FsdError(f"{final} is the record of a finished run: leave --resume out to measure again.")
    if not resume:
        if len(read_lines(path, "bench") or []) > 1:
            raise FsdError(f"{path} holds an unfinished run: add --resume to continue it, or delete it.")
        path.unlink(missing_ok=True)  # it ended before its first run
    return path


def _is_record(file: Path) -> bool:
    try:
        record = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("methods"), dict)


def _measure(
    settings: Settings,
    models: Models,
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    groups: Sequence[list[int]],
    jobs: Sequence[Trial],
    file: RunFile,
    progress: bool,
) -> dict[str, Any]:
    specs, blocks = parse_methods(settings.methods), None
    names = [spec.name for spec in specs]
    with ExitStack() as stack:
        if settings.isolate is None:
            methods = make_methods(settings.methods, models)
            for method in methods:
                stack.callback(method.close)
            sessions = [Session(names, lambda: methods, jobs)]
        else:
            blocks = {group: group % settings.isolate for group in range(len(groups))}
            sessions = isolated(settings, specs, jobs, blocks)
        encoded = encode_rows(rows, models.encoder(settings.raw))
        asked = RunSpec(
            [[encoded[index] for index in group] for group in groups], settings.max_new_tokens, settings.seed or 0,
            settings.warmup,
        )  # fmt: skip
        run_jobs(sessions, asked, file, title="bench", progress=progress)
    turns = turns_of(file.runs, groups, names, settings.temperature)
    if settings.log_likelihood:
        _add_log_likelihoods(models.scorer(), models.tokenizer, encoded, turns, progress)
    for turn in turns:
        for index, answer in turn.answers():
            measure(answer, models.tokenizer, encoded[index], rows[index], references[index])
    prompts = [BenchPrompt(row.id, category_of(row), f"{row.file}:{row.line}", ids) for row, ids in zip(rows, encoded)]
    described = {name: file.described[name] for name in names}
    record = build_record(prompts, described, turns, settings.seed or 0, settings.baselines, blocks)
    record["settings"] = settings.to_dict()
    record["environment"] = {
        "dtype": settings.dtype,
        "seed": settings.seed or 0,
        "hf_model": "a second copy of the weights, its linear layers not packed" if models.reference_loaded else None,
    }
    return record


def isolated(
    settings: Settings, specs: Sequence[Spec], jobs: Sequence[Trial], blocks: Mapping[int, int]
) -> list[Session]:
    """Return a session per method and block of groups. The method that goes first rotates by block."""
    return [
        Session(
            [spec.name],
            partial(_start, settings, spec),
            [job for job in jobs if job.method == spec.name and blocks[job.group] == block],
        )
        for block in sorted(set(blocks.values()))
        for spec in rotated(specs, block)
    ]


def _start(settings: Settings, spec: Spec) -> list[Method]:
    """Start a method in its own process."""
    if spec.kind in METHODS and METHODS.get(spec.kind).own_process:
        return [METHODS.get(spec.kind).make(spec, Models(settings))]
    values = json.dumps({**settings.to_dict(), "isolate": None})
    return [ProcessMethod(spec.name, [sys.executable, "-m", "fsd_bench.worker", values, spec.text])]


def _add_log_likelihoods(
    target: Target, tokenizer: Any, prompts: Sequence[list[int]], turns: Sequence[Comparison], progress: bool
) -> None:
    """Score every different answer once. An answer without token ids is scored by its text's own tokens."""
    answers: dict[tuple[int, tuple[int, ...]], list[MeasuredAnswer]] = {}
    for turn in turns:
        for index, answer in turn.answers():
            tokens = answer.tokens
            if tokens is None and answer.text:
                tokens = tokenizer.encode(answer.text, add_special_tokens=False)
            if tokens:
                answers.setdefault((index, tuple(tokens)), []).append(answer)
    scores = mean_log_likelihoods(target, [(prompts[index], tokens) for index, tokens in answers], progress=progress)
    for alike, score in zip(answers.values(), scores, strict=True):
        for answer in alike:
            answer.log_likelihood = score
