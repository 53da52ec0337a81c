"""Run a benchmark: read prompts, let the methods answer them, write the record."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fsd_bench.base import Comparison, MeasuredAnswer, Method, TimedRun
from fsd_bench.later_turns import TurnPrompts, with_later_turns
from fsd_bench.layouts import layout_of
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.methods import METHODS, MethodSpec, make_methods, parse_methods
from fsd_bench.models import Models
from fsd_bench.process import ProcessMethod
from fsd_bench.prompts import category_of, encode_rows, first_rows, group_prompts, rows_digest
from fsd_bench.record import BenchPrompt, build_record, write_record
from fsd_bench.runs import RunFile, Trial, alone, read_lines
from fsd_bench.score import Reference, measure, read_references
from fsd_bench.settings import RunOptions
from fsd_bench.trials import RunSpec, Session, comparisons_of, in_turns, rotated, run_trials
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, usable_name, writable
from fsd_core.options import set_threads
from fsd_core.text.encoding import PromptRow
from fsd_infer.environment import environment
from fsd_infer.targets.target import Target


def run(
    prompts: str | Path,
    methods: Sequence[str],
    *,
    json_path: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: Sequence[str] | None = None,
    again: str = "the same command with --resume continues it",
    **options: Any,
) -> dict[str, Any]:
    """Measure ``methods`` on ``prompts``.

    Args:
        prompts: file of prompts.
        methods: e.g. ["plain", "exact", "exact@heads/mine", "hf-generate", "vllm=server:http://localhost:8000"]; see
            :mod:`fsd_bench.methods`.
        json_path: file of the record, written atomically. Until then finished runs are kept next to it.
        resume: continue such an unfinished measurement.
        overwrite: replace the record of a finished measurement.
        progress: show a progress bar.
        command: command line in the record; default: this process's.
        again: how an unfinished measurement goes on, in the words of errors.
        options: other fields of :class:`.RunOptions`.

    Returns:
        The record: ``methods``, ``baseline``, ``ratios``, ``differences``, ``agreement``, ``prompts`` (see
        :func:`.build_record`), ``settings`` and ``environment``.

    Raises:
        FsdError: an unknown method, a malformed row, another run in the way, or whatever loading or decoding raises.
        ServerError: a server cannot be reached. Once decoding has begun, finished runs are kept.
    """
    settings = RunOptions(prompts, methods, **options)
    settings.check()
    path = None if json_path is None else partial_path(json_path, resume, overwrite)
    set_threads(settings.threads)
    models = Models(settings)
    encode = models.encoder(settings.raw)
    layout = layout_of(settings.layout, settings.fields)
    rows = first_rows(settings.prompts, encode, settings.limit, settings.every, settings.strict, json_path, layout)
    references = read_references(rows, settings.score, settings.run_code)
    rows, previous_turns = with_later_turns(rows, settings.most_turns)
    references += [None] * len(previous_turns)
    groups = group_prompts(_categories(rows, previous_turns), settings.batch_size)
    names = [spec.name for spec in parse_methods(methods)]
    trials = in_turns(names, len(groups), {settings.temperature: settings.repeat})
    run_file = RunFile(
        path, "bench", jsonable({**_settings_of_runs(settings), "rows_sha256": rows_digest(rows)}),
        {trial: len(groups[trial.group]) for trial in trials},
        advice=(again, "delete the file"),
    )  # fmt: skip
    with run_file.kept():
        record = _measure(settings, models, rows, references, previous_turns, groups, trials, run_file, progress)
        record["environment"] |= environment(command)
        record = jsonable(record)
        if path is not None:
            write_record(writable(json_path, "the record"), record)  # type: ignore[arg-type]
            path.unlink()
    return record


def _settings_of_runs(settings: RunOptions) -> dict[str, Any]:
    """Return the settings on which finished runs depend."""
    unmeasured = ("baselines", "score", "strict", "run_code")
    return {key: value for key, value in settings.to_dict().items() if key not in unmeasured}


def partial_path(json_path: str | Path, resume: bool, overwrite: bool) -> Path:
    """Return where the runs of a record are kept until it is written.

    Raises:
        FsdError: another kind of file is in the way, an unfinished measurement without ``resume``, or a finished one
            without ``overwrite``.
    """
    final = Path(usable_name(json_path, "the record"))
    path = final.parent / f"{final.name}.partial.jsonl"
    if final.is_file() and final.stat().st_size and not _is_record(final):
        raise FsdError(f"{final} is not a record of a benchmark and is not overwritten: give another name.")
    writable(final, "the record", overwrite or (resume and path.exists()))
    if not resume:
        with alone(path):
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
    settings: RunOptions,
    models: Models,
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    previous_turns: Mapping[int, int],
    groups: Sequence[list[int]],
    trials: Sequence[Trial],
    file: RunFile,
    progress: bool,
) -> dict[str, Any]:
    specs = parse_methods(settings.methods)
    names, isolate = [spec.name for spec in specs], settings.isolate
    blocks = None if isolate is None else {group: group % isolate for group in range(len(groups))}
    with ExitStack() as stack:
        if blocks is not None:
            sessions = isolated(settings, specs, trials, blocks)
        else:
            methods = make_methods(settings.methods, models)
            for method in methods:
                stack.callback(method.close)
            sessions = [Session(names, lambda: methods, trials)]
        encode = models.encoder(settings.raw)
        first = encode_rows(rows[: len(rows) - len(previous_turns)], encode)
        prompts = TurnPrompts(rows, previous_turns, groups, encode, first)
        spec = RunSpec(prompts, settings.max_new_tokens, settings.seed or 0, settings.warmup)
        run_trials(sessions, spec, file, models.check_tokens, title="bench", progress=progress)
    comparisons = comparisons_of(file.runs, groups, names, settings.temperature)
    answers = _with_prompts(comparisons, prompts, file.runs, settings.temperature)
    if settings.log_likelihood:
        _add_log_likelihoods(models.scorer(), models.tokenizer, answers, progress)
    for index, ids, answer in answers:
        measure(answer, models.tokenizer, ids, rows[index], references[index])
    bench_prompts = _bench_prompts(rows, previous_turns, {index: ids for index, ids, _ in reversed(answers)})
    descriptions = {name: file.described[name] for name in names}
    record = build_record(bench_prompts, descriptions, comparisons, settings.seed or 0, settings.baselines, blocks)
    record["settings"] = settings.to_dict()
    record["environment"] = {
        "dtype": settings.dtype,
        "seed": settings.seed or 0,
        "hf_model": "a second copy of the weights, its linear layers not packed" if models.reference_loaded else None,
    }
    return record


def _bench_prompts(
    rows: Sequence[PromptRow], previous_turns: Mapping[int, int], encoded: Mapping[int, list[int]]
) -> list[BenchPrompt]:
    """Return the prompts for a record. ``encoded``: ids by index; of a later turn those of the first method."""
    return [
        BenchPrompt(row.id, category, f"{row.file}:{row.line}", encoded[index])
        for index, (row, category) in enumerate(zip(rows, _categories(rows, previous_turns)))
    ]


def isolated(
    settings: RunOptions, specs: Sequence[MethodSpec], trials: Sequence[Trial], blocks: Mapping[int, int]
) -> list[Session]:
    """Return a session per method and block of groups. The method that goes first rotates by block."""
    return [
        Session(
            [spec.name],
            partial(_start, settings, spec),
            [trial for trial in trials if trial.method == spec.name and blocks[trial.group] == block],
        )
        for block in sorted(set(blocks.values()))
        for spec in rotated(specs, block)
    ]


def _start(settings: RunOptions, spec: MethodSpec) -> list[Method]:
    """Start a method in its own process."""
    if spec.kind in METHODS and METHODS.get(spec.kind).own_process:
        return [METHODS.get(spec.kind).make(spec, Models(settings))]
    values = json.dumps({**settings.to_dict(), "isolate": None})
    return [ProcessMethod(spec.name, [sys.executable, "-m", "fsd_bench.worker", values, spec.text])]


def _categories(rows: Sequence[PromptRow], previous_turns: Mapping[int, int]) -> list[str]:
    """Return the rows' categories. Each later turn has its own, since batches do not mix categories."""
    categories = [category_of(row) for row in rows]
    numbers: dict[int, int] = {}
    for index, previous in previous_turns.items():
        numbers[index] = numbers.get(previous, 1) + 1
        categories[index] += f", turn {numbers[index]}"
    return categories


def _with_prompts(
    comparisons: Sequence[Comparison], prompts: TurnPrompts, runs: Mapping[Trial, TimedRun], temperature: float
) -> list[tuple[int, list[int], MeasuredAnswer]]:
    """Return each answer with its prompt's index and token ids."""
    return [
        (index, ids, answer)
        for comparison in comparisons
        for name, run in comparison.runs.items()
        for index, ids, answer in zip(
            comparison.prompts,
            prompts(Trial(name, comparison.group, comparison.repeat, temperature), runs),
            run.answers,
            strict=True,
        )
    ]


def _add_log_likelihoods(
    target: Target, tokenizer: Any, answers: Sequence[tuple[int, list[int], MeasuredAnswer]], progress: bool
) -> None:
    """Score every different answer once. An answer without token ids is scored by its text's own tokens."""
    answers_by_text: dict[tuple[tuple[int, ...], tuple[int, ...]], list[MeasuredAnswer]] = {}
    for _, ids, answer in answers:
        tokens = answer.tokens
        if tokens is None and answer.text:
            tokens = tokenizer.encode(answer.text, add_special_tokens=False)
        if tokens:
            answers_by_text.setdefault((tuple(ids), tuple(tokens)), []).append(answer)
    scores = mean_log_likelihoods(target, [(list(ids), tokens) for ids, tokens in answers_by_text], progress=progress)
    for same_answers, score in zip(answers_by_text.values(), scores, strict=True):
        for answer in same_answers:
            answer.log_likelihood = score
