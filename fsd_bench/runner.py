"""The benchmark itself: read prompts, let the methods answer them, write the record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsd_bench.base import Answer, Turn
from fsd_bench.environment import environment
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.measures import final_answer, word_coverage
from fsd_bench.methods import make_methods, parse_methods
from fsd_bench.models import Models
from fsd_bench.partial import PartialFile
from fsd_bench.record import BenchPrompt, build_record
from fsd_bench.schedule import group_prompts, take_blocks, take_turns
from fsd_bench.score import Reference, asked_options, read_references
from fsd_bench.settings import Settings, set_threads
from fsd_bench.texts import other_language
from fsd_infer.chat.encoding import PromptRow, encode_chat, encode_text, need_tokenizer, read_prompts
from fsd_infer.engine.ngrams import copied_ngrams, repeated_ngrams
from fsd_infer.errors import ContextLengthError, DataError, FsdError
from fsd_infer.files import jsonable
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
        json_path: write the record there, atomically; until then finished turns are kept beside it.
        resume: continue such an unfinished run.
        progress: show a progress bar.
        command: the command line to store in the record; default this process's.
        options: other fields of :class:`Settings`.

    Returns:
        The record: ``methods``, ``baseline``, ``ratios``, ``differences``, ``agreement``, ``prompts`` (see
        ``build_record``), ``settings`` and ``environment``.

    Raises:
        FsdError: unknown method, malformed row, unfinished run in the way, and whatever loading or decoding raises.
        ServerError: a server that cannot be reached: before anything is loaded, or later; then finished turns are kept.
    """
    settings = Settings(prompts, methods, **options)
    settings.check()
    rows = read_rows(settings)
    references = read_references(rows, settings.score)
    partial = None
    if json_path is not None:
        asked_for = hashlib.sha256("".join(row.id for row in rows).encode()).hexdigest()[:16]
        measured = {key: value for key, value in settings.to_dict().items() if key not in ("baselines", "score")}
        partial = PartialFile(json_path, jsonable({**measured, "rows_sha256": asked_for}), resume)
    try:
        record = _measure(settings, rows, references, partial, progress)
    except FsdError as error:
        if partial is not None and partial.turns:
            error.args = (
                f"{error} {len(partial.turns)} finished turns are kept in {partial.path}: the same command with "
                "--resume goes on from there.",
            )
        elif partial is not None:  # nothing to lose
            partial.path.unlink()
        raise
    record["environment"] |= environment(command)
    record = jsonable(record)
    if partial is not None:
        partial.finish(record)
    return record


def _measure(
    settings: Settings,
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    partial: PartialFile | None,
    progress: bool,
) -> dict[str, Any]:
    set_threads(settings)
    models = Models(settings)
    blocks = None
    if settings.isolate is not None:
        asked = encode_rows(rows, models)
        groups = group_prompts(asked, settings.batch_size)
        blocks = {group: group % settings.isolate for group in range(len(groups))}
        turns, described = take_blocks(settings, parse_methods(settings.methods), asked, blocks, partial, progress)
    else:
        methods = make_methods(settings.methods, models)
        try:
            asked = encode_rows(rows, models)
            turns = take_turns(settings, methods, asked, partial, progress)
            described = {method.name: method.describe() for method in methods}
        finally:
            for method in methods:
                method.close()
    if settings.log_likelihood:
        _add_log_likelihoods(models.scorer(), models.tokenizer, asked, turns, progress)
    _add_measures(models.tokenizer, asked, rows, references, turns)
    record = build_record(asked, described, turns, settings.seed, settings.baselines, blocks)
    record["settings"] = settings.to_dict()
    record["environment"] = {
        "dtype": settings.dtype,
        "seed": settings.seed,
        "hf_model": "a second copy of the weights, its linear layers not packed" if models.reference_loaded else None,
    }
    return record


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


def encode_rows(rows: Sequence[PromptRow], models: Models) -> list[BenchPrompt]:
    """Their token ids; errors as of :func:`encode_row`."""
    of_target = models.options.target, models.tokenizer, models.max_positions
    return [
        BenchPrompt(
            row.id, str(row.row.get("category") or row.source), f"{row.file}:{row.line}", encode_row(row, *of_target)
        )
        for row in rows
    ]


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
        for run_ in turn.runs.values():
            for index, answer in zip(turn.prompts, run_.answers, strict=True):
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


def _add_measures(
    tokenizer: Any,
    prompts: Sequence[BenchPrompt],
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    turns: Sequence[Turn],
) -> None:
    """:func:`measure` every answer."""
    for turn in turns:
        for run_ in turn.runs.values():
            for index, answer in zip(turn.prompts, run_.answers, strict=True):
                measure(answer, tokenizer, prompts[index].ids, rows[index], references[index])


def final_options(row: PromptRow, reference: Reference | None) -> tuple[str, ...]:
    """The options that a prompt's answer is to name, if any."""
    return reference.options if reference is not None and reference.options else asked_options(row)


def measure(
    answer: Answer, tokenizer: Any, prompt: Sequence[int], row: PromptRow, reference: Reference | None
) -> str | None:
    """Hold an answer against its reference, if there is one, and note copies, repetition and what it says in the end.

    Returns its text. Nothing is noted of an answer that is unknown (of some servers).
    """
    text, tokens = answer.text, answer.tokens
    if tokens is not None:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
    elif text is not None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    if text is None or tokens is None:
        return None
    answer.copied_4grams, answer.repeated_4grams = copied_ngrams(prompt, tokens), repeated_ngrams(tokens)
    answer.final = final_answer(text, final_options(row, reference))
    if reference is not None:
        answer.score = reference.score(text)
        if reference.kind == "rouge":
            answer.coverage = word_coverage(row.messages[-1]["content"], text)
        elif reference.kind == "chrf":
            answer.other_language = float(other_language(text, reference.value))  # type: ignore[arg-type]
    return text
