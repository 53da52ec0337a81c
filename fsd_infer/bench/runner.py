"""The benchmark itself: read prompts, warm up, let the methods take turns, write the record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fsd_infer.bench.base import Answer, Method
from fsd_infer.bench.environment import environment
from fsd_infer.bench.likelihood import mean_log_likelihoods
from fsd_infer.bench.methods import make_methods, parse_methods
from fsd_infer.bench.models import Models
from fsd_infer.bench.partial import PartialFile
from fsd_infer.bench.record import BenchPrompt, Turn, build_record, choose_baselines, jsonable
from fsd_infer.bench.score import AUTO, Reference, check_score, read_references
from fsd_infer.bench.server import ServerError
from fsd_infer.chat.encoding import PromptRow, encode_chat, read_prompts
from fsd_infer.drafters import TreeShape
from fsd_infer.errors import ContextLengthError, DataError, FsdError
from fsd_infer.target import Target
from fsd_infer.targets.loading import parse_dtype

WARMUP_TOKENS = 16


@dataclass
class Settings:
    """What is measured, and how.

    Attributes:
        prompts: .jsonl, .jsonl.gz or .json file; rows with `turns` (the first is asked), `prompt`, `question`,
            `instruction` or `messages`.
        methods: see :mod:`fsd_infer.bench.methods`.
        target, drafter, dtype, device, tree, cuda_graphs, quantize: as in ``FuzzyDecoder.from_pretrained``, dtype by
            name.
        limit: only the first so many prompts; None for all.
        every: take each so-many-th row of the file (files are often sorted by category).
        max_new_tokens: of each answer.
        temperature: 0 is greedy.
        repeat: how often each method answers each prompt.
        seed: of draws and of the bootstrap.
        batch_size: prompts that are decoded together. Batches never mix categories.
        threads: of torch; None leaves them as they are.
        warmup: run every method once, uncounted, before anything is timed.
        log_likelihood: also report the target's mean log-likelihood per token, from untimed forwards over the answers.
        baselines: names of the methods that the others are compared with; by default hf-generate and plain where they
            are measured.
        score: which references of the rows the answers are held against, see :mod:`fsd_infer.bench.score`.
    """

    prompts: str | Path
    methods: Sequence[str]
    target: str = "smollm2-135m"
    drafter: str | None = None
    dtype: str = "bf16"
    device: str | None = None
    tree: TreeShape | str | None = None
    cuda_graphs: bool = False
    quantize: bool = True
    limit: int | None = None
    every: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    repeat: int = 1
    seed: int = 0
    batch_size: int = 1
    threads: int | None = None
    warmup: bool = True
    log_likelihood: bool = False
    baselines: Sequence[str] = ()
    score: str = AUTO

    def check(self) -> None:
        """Raises FsdError for what can be refused before anything is loaded."""
        choose_baselines([spec.name for spec in parse_methods(self.methods)], self.baselines)
        parse_dtype(self.dtype)
        check_score(self.score)
        for name in ("limit", "every", "max_new_tokens", "repeat", "batch_size", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FsdError(f"{name} must be at least 1, got {value}.")
        if not self.temperature >= 0:
            raise FsdError(f"temperature must not be negative, got {self.temperature}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        lists = {"methods": list(self.methods), "baselines": list(self.baselines)}
        return {**asdict(self), "prompts": Path(self.prompts).name, **lists}


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
            :mod:`fsd_infer.bench.methods`.
        json_path: write the record there, atomically; until then finished turns are kept beside it.
        resume: continue such an unfinished run.
        progress: show a progress bar.
        command: the command line to store in the record; default this process's.
        options: other fields of :class:`Settings`.

    Returns:
        The record: ``methods``, ``baseline``, ``ratios``, ``prompts`` (see ``build_record``), ``settings`` and
        ``environment``.

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
    except ServerError as error:
        if partial is None:
            raise
        if not partial.turns:  # nothing to lose
            partial.path.unlink()
            raise
        raise ServerError(
            f"{error} {len(partial.turns)} finished turns are kept in {partial.path}: start the server again, and the "
            "same command with --resume goes on from there.",
            error.status,
        ) from error
    record["environment"] |= environment(command)
    record = jsonable(record)
    if partial is not None:
        partial.finish(record)
    return record


def models_of(settings: Settings) -> Models:
    """What its methods run on, with nothing loaded yet."""
    return Models(
        settings.target, settings.drafter, settings.dtype, settings.device, settings.tree, settings.cuda_graphs,
        settings.quantize,
    )  # fmt: skip


def _measure(
    settings: Settings,
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    partial: PartialFile | None,
    progress: bool,
) -> dict[str, Any]:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    models = models_of(settings)
    made = make_methods(settings.methods, models)
    asked = encode_rows(rows, models)
    turns = take_turns(settings, made, asked, partial, progress)
    if settings.log_likelihood:
        _add_log_likelihoods(models.scorer(), asked, turns)
    _add_scores(models.tokenizer, references, turns)
    described = {method.name: method.describe() for method in made}
    record = build_record(asked, described, turns, settings.seed, settings.baselines)
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
    """Their token ids. Raises ContextLengthError for a prompt that fills the target's context."""
    tokenizer, limit = models.tokenizer, models.max_positions
    asked = []
    for row in rows:
        ids = encode_chat(tokenizer, row.messages)
        where = f"{row.file}:{row.line}"
        if limit is not None and len(ids) >= limit:
            raise ContextLengthError(
                f"{where}: the prompt has {len(ids)} tokens, but {models.target} has a context of {limit} tokens: "
                "shorten or remove it."
            )
        asked.append(BenchPrompt(row.id, str(row.row.get("category") or row.source), where, ids))
    return asked


def group_prompts(prompts: Sequence[BenchPrompt], size: int) -> list[list[int]]:
    """Indices of the prompts in batches of ``size`` (fewer at a category's end), each within one category."""
    if size == 1:
        return [[index] for index in range(len(prompts))]
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    return [indices[i : i + size] for indices in by_category.values() for i in range(0, len(indices), size)]


def generate_options(settings: Settings) -> dict[str, Any]:
    """Arguments of ``generate``, the same for every method."""
    if settings.temperature == 0:
        return dict(max_new_tokens=settings.max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None)
    return dict(max_new_tokens=settings.max_new_tokens, do_sample=True, temperature=settings.temperature)


def take_turns(
    settings: Settings,
    methods: Sequence[Method],
    prompts: Sequence[BenchPrompt],
    partial: PartialFile | None,
    progress: bool = False,
) -> list[Turn]:
    """Every method answers every prompt; which goes first rotates. Turns that ``partial`` holds are not repeated."""
    groups = group_prompts(prompts, settings.batch_size)
    options = generate_options(settings)
    turns = partial.turns if partial is not None else []
    done = {(turn.group, turn.repeat) for turn in turns}
    order = [(group, repeat) for group in range(len(groups)) for repeat in range(settings.repeat)]
    todo = [place for place in order if place not in done]
    if todo and settings.warmup:
        warm = {**options, "max_new_tokens": min(settings.max_new_tokens, WARMUP_TOKENS)}
        for method in tqdm(methods, desc="warm-up", unit="method", disable=not progress, leave=False):
            method.answer([prompts[i].ids for i in groups[0]], warm, settings.seed)
    answers = len(methods) * len(order)
    bar = tqdm(
        total=answers, initial=len(done) * len(methods), desc="bench", unit="run", disable=not progress, smoothing=0.05
    )
    with bar:
        for group, repeat in todo:
            ids = [prompts[i].ids for i in groups[group]]
            first = (group + repeat) % len(methods)
            runs = {}
            for method in [*methods[first:], *methods[:first]]:
                seed = settings.seed + 1000 * group + repeat
                runs[method.name] = method.answer(ids, options, seed)
                bar.set_postfix_str(method.name, refresh=False)
                bar.update()
            turn = Turn(group, repeat, groups[group], runs)
            if partial is not None:
                partial.add(turn)
            else:
                turns.append(turn)
    return turns


def _add_log_likelihoods(target: Target, prompts: Sequence[BenchPrompt], turns: Sequence[Turn]) -> None:
    """Every different answer is scored once; answers whose tokens are unknown, or none, are left out."""
    answers: dict[tuple[int, tuple[int, ...]], list[Answer]] = {}
    for turn in turns:
        for run_ in turn.runs.values():
            for index, answer in zip(turn.prompts, run_.answers, strict=True):
                if answer.tokens:
                    answers.setdefault((index, tuple(answer.tokens)), []).append(answer)
    scores = mean_log_likelihoods(target, [(prompts[index].ids, tokens) for index, tokens in answers])
    for alike, score in zip(answers.values(), scores, strict=True):
        for answer in alike:
            answer.log_likelihood = score


def _add_scores(tokenizer: Any, references: Sequence[Reference | None], turns: Sequence[Turn]) -> None:
    """Every answer to a prompt with a reference is held against it, but those of unknown text."""
    for turn in turns:
        for run_ in turn.runs.values():
            for index, answer in zip(turn.prompts, run_.answers, strict=True):
                reference, text = references[index], answer.text
                if reference is None:
                    continue
                if answer.tokens is not None:
                    text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
                answer.score = None if text is None else reference.score(text)
