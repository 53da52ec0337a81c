"""The benchmark itself: read prompts, let the methods answer them, write the record."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fsd_bench.base import Answer, Method, Turn
from fsd_bench.environment import environment
from fsd_bench.jobs import Asked, Session, in_turns, rotated, run_jobs, turns_of
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.measures import measure
from fsd_bench.methods import METHODS, Spec, make_methods, parse_methods
from fsd_bench.models import Models
from fsd_bench.process import ProcessMethod
from fsd_bench.record import BenchPrompt, build_record, write_record
from fsd_bench.runs import Job, RunFile, read_lines
from fsd_bench.score import Reference, read_references
from fsd_bench.settings import Settings, set_threads
from fsd_infer.chat.encoding import PromptRow, encode_chat, encode_text, need_tokenizer, read_prompts
from fsd_infer.errors import ContextLengthError, DataError, FsdError
from fsd_infer.files import jsonable, writable
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
        json_path: write the record there, atomically; until then finished runs are kept beside it.
        resume: continue such an unfinished measurement.
        progress: show a progress bar.
        command: the command line to store in the record; default this process's.
        options: other fields of :class:`Settings`.

    Returns:
        The record: ``methods``, ``baseline``, ``ratios``, ``differences``, ``agreement``, ``prompts`` (see
        ``build_record``), ``settings`` and ``environment``.

    Raises:
        FsdError: unknown method, malformed row, unfinished run in the way, and whatever loading or decoding raises.
        ServerError: a server that cannot be reached: before anything is loaded, or later; then finished runs are kept.
    """
    settings = Settings(prompts, methods, **options)
    settings.check()
    rows = read_rows(settings)
    references = read_references(rows, settings.score)
    measured = {key: value for key, value in settings.to_dict().items() if key not in ("baselines", "score")}
    path = None if json_path is None else partial_path(json_path, resume)
    groups = group_prompts([_category(row) for row in rows], settings.batch_size)
    jobs = in_turns(
        [spec.name for spec in parse_methods(methods)], len(groups), {settings.temperature: settings.repeat}
    )
    file = RunFile(
        path, "bench", jsonable({**measured, "rows_sha256": rows_digest(rows)}),
        {job: len(groups[job.group]) for job in jobs},
        advice=("the same command with --resume goes on from there", "delete the file"),
    )  # fmt: skip
    with file.kept():
        record = _measure(settings, rows, references, groups, jobs, file, progress)
    record["environment"] |= environment(command)
    record = jsonable(record)
    if path is not None:
        write_record(writable(json_path, "the record"), record)  # type: ignore[arg-type]
        path.unlink()
    return record


def partial_path(json_path: str | Path, resume: bool) -> Path:
    """Where the runs of a record are kept until it is written.

    Raises FsdError where a file of another kind is in the way, an unfinished measurement without ``resume``, or a
    finished one with it.
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
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    groups: Sequence[list[int]],
    jobs: Sequence[Job],
    file: RunFile,
    progress: bool,
) -> dict[str, Any]:
    set_threads(settings)
    models, specs, blocks = Models(settings), parse_methods(settings.methods), None
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
        prompts = encode_rows(rows, models, settings.raw)
        asked = Asked(
            [[prompts[index].ids for index in group] for group in groups], settings.max_new_tokens, settings.seed,
            settings.warmup,
        )  # fmt: skip
        run_jobs(sessions, asked, file, title="bench", progress=progress)
    turns = turns_of(file.runs, groups, names, settings.temperature)
    if settings.log_likelihood:
        _add_log_likelihoods(models.scorer(), models.tokenizer, prompts, turns, progress)
    for turn in turns:
        for index, answer in turn.answers():
            measure(answer, models.tokenizer, prompts[index].ids, rows[index], references[index])
    described = {name: file.described[name] for name in names}
    record = build_record(prompts, described, turns, settings.seed, settings.baselines, blocks)
    record["settings"] = settings.to_dict()
    record["environment"] = {
        "dtype": settings.dtype,
        "seed": settings.seed,
        "hf_model": "a second copy of the weights, its linear layers not packed" if models.reference_loaded else None,
    }
    return record


def isolated(
    settings: Settings, specs: Sequence[Spec], jobs: Sequence[Job], blocks: Mapping[int, int]
) -> list[Session]:
    """A process for each method and block of groups, one at a time; which method goes first rotates by block."""
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
    """A method in a process of its own."""
    if spec.kind in METHODS and METHODS.get(spec.kind).own_process:
        return [METHODS.get(spec.kind).make(spec, Models(settings))]
    values = json.dumps({**settings.to_dict(), "isolate": None})
    return [ProcessMethod(spec.name, [sys.executable, "-m", "fsd_bench.worker", values, spec.text])]


# prompts -------------------------------------------------------------------------------------------------------------


def read_rows(settings: Settings) -> list[PromptRow]:
    """The prompts that are asked for. Raises DataError for a malformed row, or none at all."""
    rows = []
    for number, row in enumerate(read_prompts(settings.prompts)):  # a malformed row is an error only where it is used
        if number % settings.every == 0:
            rows.append(row)
        if settings.limit is not None and len(rows) >= settings.limit:
            break
    if not rows:
        raise DataError(f"{settings.prompts}: no prompts. Give a file with at least one row.")
    return rows


def rows_digest(rows: Sequence[PromptRow]) -> str:
    """Of prompts and their order."""
    return hashlib.sha256("".join(row.id for row in rows).encode()).hexdigest()[:16]


def _category(row: PromptRow) -> str:
    return str(row.row.get("category") or row.source)


def group_prompts(categories: Sequence[str], size: int) -> list[list[int]]:
    """Indices of the prompts in batches of ``size`` (fewer at a category's end), each within one category."""
    if size == 1:
        return [[index] for index in range(len(categories))]
    by_category: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        by_category.setdefault(category, []).append(index)
    return [indices[i : i + size] for indices in by_category.values() for i in range(0, len(indices), size)]


def encode_rows(rows: Sequence[PromptRow], models: Models, raw: bool = False) -> list[BenchPrompt]:
    """With their token ids; arguments and errors as of :func:`encode_row`."""
    of_target = models.options.target, models.tokenizer, models.max_positions, raw
    return [BenchPrompt(row.id, _category(row), f"{row.file}:{row.line}", encode_row(row, *of_target)) for row in rows]


def encode_row(row: PromptRow, target: str, tokenizer: Any, limit: int | None, raw: bool = False) -> list[int]:
    """The token ids of a prompt for a target with a context of ``limit`` tokens.

    ``raw``: of the last message as it is, without the chat template.

    Raises:
        FsdError: the target has no tokenizer.
        ContextLengthError: the prompt fills its context.
    """
    tokenizer = need_tokenizer(tokenizer, target)
    ids = encode_text(tokenizer, row.messages[-1]["content"]) if raw else encode_chat(tokenizer, row.messages)
    if limit is not None and len(ids) >= limit:
        raise ContextLengthError(
            f"{row.file}:{row.line}: the prompt has {len(ids)} tokens, but {target} has a context of {limit} tokens: "
            "shorten or remove it."
        )
    return ids


def _add_log_likelihoods(
    target: Target, tokenizer: Any, prompts: Sequence[BenchPrompt], turns: Sequence[Turn], progress: bool
) -> None:
    """Every different answer is scored once. Of an answer whose text alone is known, the text's own tokens are."""
    answers: dict[tuple[int, tuple[int, ...]], list[Answer]] = {}
    for turn in turns:
        for index, answer in turn.answers():
            tokens = answer.tokens
            if tokens is None and answer.text:
                tokens = tokenizer.encode(answer.text, add_special_tokens=False)
            if tokens:
                answers.setdefault((index, tuple(tokens)), []).append(answer)
    pairs = [(prompts[index].ids, tokens) for index, tokens in answers]
    scores = mean_log_likelihoods(target, pairs, progress=progress)
    for alike, score in zip(answers.values(), scores, strict=True):
        for answer in alike:
            answer.log_likelihood = score
