"""The plan of `fsd-train regenerate`: prompts, their sampling and batches, and later turns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsd_core.errors import DataError
from fsd_core.text.conversations import IMAGES, PROMPT_FIELDS, Message, row_exchanges, template_options
from fsd_core.text.encoding import PromptRow, encode_chat, encode_text, read_prompts
from fsd_core.text.image_marks import has_mark
from fsd_core.text.image_rows import with_images
from fsd_core.text.row_check import RowCheck
from fsd_train.data.backends import Completion, RegenerationRequest, stable_seed
from fsd_train.data.images import ImageReader, SequenceImages

WINDOW = 16  # batches sorted by length together: little padding, while a prefix of the output stays a fair sample
# fields of a prompt's row that answers replace
_OWN = {*PROMPT_FIELDS, *IMAGES, "id", "prompt_ids", "response_ids", "finish_reason", "source", "ids_from"}
_SAMPLING = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class PromptSchedule:
    """Jobs to answer.

    Attributes:
        batches: jobs by batch, in their final order.
        read: number of prompts, or of conversations with another turn.
        too_long: how many of them are skipped because the prompt is too long.
        cut: how many of them are skipped because the previous answer reached the limit.
        max_prompt_tokens, batch_size: limits for later turns.
        template: arguments of the chat template.
    """

    batches: list[list[RegenerationRequest]]
    read: int
    too_long: int
    cut: int
    max_prompt_tokens: int
    batch_size: int
    template: Mapping[str, Any]

    @property
    def jobs(self) -> list[RegenerationRequest]:
        return [job for batch in self.batches for job in batch]

    @property
    def ids(self) -> set[str]:
        return {job.id for job in self.jobs}


def plan_jobs(
    paths: Sequence[str | Path],
    tokenizer: Any,
    *,
    temperatures: Sequence[tuple[float, float]] = ((0.0, 1.0),),
    max_prompt_tokens: int = 1024,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
    template: Mapping[str, Any] | None = None,
    raw: bool = False,
    check: RowCheck | None = None,
    reader: ImageReader | None = None,
) -> PromptSchedule:
    """Read prompts and plan the first turns.

    The plan depends only on the arguments, not on finished answers, so that a resumed run has the same batches. Rows
    are shuffled by ``seed``, so that a prefix of the output is a fair sample.

    Args:
        paths: prompt files. A row may have ``temperature``, ``top_k`` and ``top_p``, and ``tools`` and
            ``chat_template_kwargs`` for the chat template.
        tokenizer: the target's tokenizer.
        temperatures: (temperature, weight) pairs; the hash of a row chooses one.
        max_prompt_tokens: most tokens of a prompt with its template; longer ones are skipped and counted.
        limit: most rows to answer.
        template: arguments of the chat template for all rows, such as ``enable_thinking``.
        raw: each row is one text that the target continues without the chat template.
        check: takes account of the rows, and of malformed ones, which are skipped. None: those are errors.
        reader: reader of images in rows. None: such rows are malformed.

    Raises:
        DataError: what ``check`` raises (with file and line).
    """
    check = check or RowCheck(strict=True)
    chosen: list[tuple[str, RegenerationRequest]] = []  # with the row's hash
    row_ids: set[str] = set()
    job_ids: set[str] = set()
    read = too_long = 0
    for path in paths:
        rows = read_prompts(path, check, images=reader is not None and bool(reader.placeholders))
        for row in sorted(rows, key=lambda row: _shuffle_key(seed, row.id)):
            read += 1
            job: RegenerationRequest | None = None
            with check.using(row.where, row.row):
                job = _first_request(row, tokenizer, temperatures, template or {}, raw, reader)
            if job is None:
                continue
            if len(job.prompt_ids) > max_prompt_tokens:
                too_long += 1
            elif row.id not in row_ids:  # the same file given twice
                row_ids.add(row.id)
                # several files may count their rows from 0, and ids of later turns are reserved
                if job.id in job_ids or re.search(r"/\d+$", job.id):
                    job = replace(job, id=f"{job.id}-{row.id[:8]}")
                job_ids.add(job.id)
                chosen.append((row.id, job))
    chosen.sort(key=lambda pair: _shuffle_key(seed, pair[0]))
    jobs = [job for _, job in chosen[:limit]]
    return PromptSchedule(_batches(jobs, batch_size), read, too_long, 0, max_prompt_tokens, batch_size, template or {})


def next_turns(
    plan: PromptSchedule,
    answers: Mapping[str, tuple[str, str]],
    tokenizer: Any,
    reader: ImageReader | None = None,
    check: RowCheck | None = None,
) -> PromptSchedule:
    """Plan the turns after those of ``plan``, which follow the target's answers.

    A row's own answer stays if a tool's result follows it, because the result belongs to that call. A conversation ends
    at an answer that reached the limit.

    Args:
        plan: plan whose jobs are answered.
        answers: response and finish_reason by the id of the job.
        tokenizer: the target's tokenizer.
        reader, check: see :func:`plan_jobs`. A turn that the chat template refuses is noted by the id of its job.
    """
    check = check or RowCheck(strict=True)
    unfinished = [job for job in plan.jobs if job.rest]
    jobs: list[RegenerationRequest] = []
    too_long = cut = 0
    for job in unfinished:
        response, reason = answers[job.id]
        (question, own_answer), *rest = job.rest
        if question[0]["role"] == "tool" and job.given:
            turns = job.given
        elif reason == "stop":
            turns = [{"role": "assistant", "content": response}]
        else:
            cut += 1
            continue
        messages = [*job.messages, *turns, *question]
        job_id = f"{job.first_id}/{job.turn + 1}"
        encoded: tuple[list[int], SequenceImages | None] | None = None
        with check.using(job_id):
            encoded = _encoded(messages, job.sources, tokenizer, job.template, reader)
        if encoded is None:
            continue
        prompt_ids, images = encoded
        if len(prompt_ids) > plan.max_prompt_tokens:
            too_long += 1
            continue
        jobs.append(
            replace(
                job, id=job_id, messages=messages, prompt_ids=prompt_ids, given=own_answer,
                rest=tuple(rest), turn=job.turn + 1, images=images,
            )
        )  # fmt: skip
    batches = _batches(jobs, plan.batch_size)
    return replace(plan, batches=batches, read=len(unfinished), too_long=too_long, cut=cut)


def _first_request(
    row: PromptRow,
    tokenizer: Any,
    temperatures: Sequence[tuple[float, float]],
    template: Mapping[str, Any],
    raw: bool = False,
    reader: ImageReader | None = None,
) -> RegenerationRequest:
    (question, own_answer), *rest = row_exchanges(row.row)
    options = {**template, **template_options(row.row)}
    if rest and not getattr(tokenizer, "chat_template", None):
        raise DataError("a conversation, but this tokenizer has no chat template. Give one text per row.")
    if raw and (rest or options or [turn["role"] for turn in question] != ["user"]):
        raise DataError("a conversation or template options, which --raw does not support. Give one text per row.")
    if raw and row.images:
        raise DataError("images go into the chat template, which --raw leaves out. Leave out one of them.")
    images: SequenceImages | None = None
    if raw:
        prompt_ids = encode_text(tokenizer, question[0]["content"])
    else:
        prompt_ids, images = _encoded(question, row.images, tokenizer, options, reader)
    given_id = row.row.get("id")
    sampling = {name: _sampling(row.row, name) for name in _SAMPLING if row.row.get(name) is not None}
    return RegenerationRequest(
        id=str(given_id) if isinstance(given_id, (str, int)) and str(given_id) else row.id,
        messages=question,
        prompt_ids=prompt_ids,
        temperature=sampling.get("temperature", pick_temperature(row.id, temperatures)),
        source=row.source,
        top_k=int(sampling.get("top_k", 0)),
        top_p=sampling.get("top_p", 1.0),
        fields={name: value for name, value in row.row.items() if name not in {*_OWN, *_SAMPLING}},
        template=options,
        given=own_answer,
        rest=tuple(rest),
        sources=row.images,
        images=images,
    )


def _encoded(
    messages: Sequence[Message], sources: Sequence[Any], tokenizer: Any, options: Mapping[str, Any],
    reader: ImageReader | None,
) -> tuple[list[int], SequenceImages | None]:  # fmt: skip
    """Return a prompt's ids, and its images if its turns show any of the sources."""
    if sources and reader is not None and any(has_mark(turn["content"]) for turn in messages):
        return reader.prompt(messages, sources, options)
    return encode_chat(tokenizer, messages, options=options), None


def _sampling(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    fits, range_ = {
        "temperature": (number and value >= 0, "a number, 0 or more"),
        "top_k": (number and value >= 0 and value == int(value), "a whole number, 0 for none"),
        "top_p": (number and 0 < value <= 1, "a number above 0 and at most 1"),
    }[name]
    if not fits:
        raise DataError(f"`{name}` must be {range_}, got {value!r}.")
    return float(value)


def _shuffle_key(seed: int, row_id: str) -> tuple[int, str]:
    return stable_seed(seed, "order", row_id), row_id


def pick_temperature(row_id: str, temperatures: Sequence[tuple[float, float]]) -> float:
    """Choose a temperature of (temperature, weight) pairs by the hash of the row's id."""
    point = stable_seed("temperature", row_id) / 2**31 * sum(weight for _, weight in temperatures)
    for temperature, weight in temperatures:
        point -= weight
        if point < 0:
            return temperature
    return temperatures[-1][0]


def _batches(jobs: Sequence[RegenerationRequest], size: int) -> list[list[RegenerationRequest]]:
    """Batch jobs with equal sampling and similar length."""
    batches = []
    for start in range(0, len(jobs), WINDOW * size):
        window = jobs[start : start + WINDOW * size]
        for sampling in sorted({job.sampling for job in window}):
            same = sorted((job for job in window if job.sampling == sampling), key=lambda job: len(job.prompt_ids))
            batches += [same[i : i + size] for i in range(0, len(same), size)]
    return batches


def answer_line(answer: Completion) -> bytes:
    """Return one answer as a line of JSON with newline: the fields of the prompt's row, and ours."""
    job = answer.job
    options = {name: value for name, value in job.template.items() if name != "tools"}
    row = {
        **job.fields,
        **({"chat_template_kwargs": options} if options else {}),
        "id": job.id,
        "messages": with_images(job.messages, job.sources) if job.sources else job.messages,
        "response": answer.response,
        "prompt_ids": job.prompt_ids,
        "response_ids": answer.response_ids,
        "finish_reason": answer.finish_reason,
        "temperature": job.temperature,
        **({"top_k": job.top_k} if job.top_k else {}),
        **({"top_p": job.top_p} if job.top_p < 1 else {}),
        "source": job.source,
        "ids_from": answer.ids_from,
    }
    return (json.dumps(row, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")
