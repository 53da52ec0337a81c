"""From jobs to batches: one thread decodes in order of arrival, jobs with equal options together."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fsd_core.errors import FsdError
from fsd_core.text.pieces import Piece, Pieces
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.engine.request import Round
from fsd_infer.engine.stats import RowStats
from fsd_infer.request.guide import Guide
from fsd_infer.rules import Rule
from fsd_infer.serving.text import AnswerText
from fsd_infer.targets.image_inputs import ImageInput

log = logging.getLogger(__name__)
PATIENCE = 3.5  # seconds after which unfinished requests get the error that the server is stopping


@dataclass(frozen=True)
class Penalties:
    """OpenAI's penalties for tokens that the answer contains.

    Attributes:
        presence: subtracted from the logit of every token that the answer contains.
        frequency: subtracted once per occurrence of the token in the answer.
    """

    presence: float = 0.0
    frequency: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.presence or self.frequency)


class PenaltyProcessor:
    """A logits processor: ids [M, T], scores [M, V] -> [M, V].

    Args:
        penalties: to apply.
        start: position in the ids where answers begin.
    """

    def __init__(self, penalties: Penalties, start: int) -> None:
        self.penalties, self.start = penalties, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answers = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, answers, torch.ones_like(answers, dtype=scores.dtype))
        return scores - self.penalties.frequency * counts - self.penalties.presence * (counts > 0)


class UnavailableError(FsdError):
    """The server takes no more requests now: its queue is full, or it is stopping."""


@dataclass(frozen=True)
class Logprob:
    """A token of an answer, its log-probability under the target, and the likeliest tokens with theirs."""

    piece: Piece
    value: float
    best: tuple[tuple[Piece, float], ...] = ()


@dataclass(eq=False)  # equal requests are different jobs
class AnswerJob:
    """One requested answer, and its progress.

    Attributes:
        prompt: token ids.
        rule: the acceptance rule.
        image_input: images of the prompt.
        sampling: options of ``generate``, such as the temperature. Jobs share a batch only if theirs are equal.
        max_new_tokens: largest length of the answer.
        stop: texts that end the answer and are no part of it.
        deadline: time by ``time.monotonic`` when the answer is cut off as if it had reached its length.
        on_update: called in the decoding thread with (new text, None), and at the end with ("", the job).
        penalties: penalties of tokens that the answer contains, the same for a batch.
        guide: what the answer must be, the same for a batch.
        user: key of the prefix cache.
        alternatives: number of likeliest tokens in each of :attr:`logprobs`; None: no log-probabilities.
        quality: that the request named in place of a rule.
        on_round: called in the decoding thread with every round.
        logprobs: of the answer's tokens under the target's own logits, without temperature, bias and penalties.
        ids: tokens of the answer so far.
        text: the answer so far.
        answer: finds the text and the stop texts in the tokens.
        pieces: names the tokens of :attr:`logprobs`.
        reason: "stop", "length", "abort" if the server stopped, as vLLM says it, or the exception that made the job
            fail; None while it runs.
        stats: stats of the answer, once it has ended.
        cached: tokens of the prompt that were read from the prefix cache.
        cancelled: set when the client no longer wants the answer.
        stopped: set when the server stops.
    """

    prompt: list[int]
    rule: Rule
    sampling: dict[str, Any]
    max_new_tokens: int
    stop: Sequence[str]
    deadline: float
    on_update: Callable[[str, AnswerJob | None], None]
    image_input: ImageInput | None = None
    penalties: Penalties = Penalties()
    guide: Guide | None = None
    user: str = ""
    alternatives: int | None = None
    quality: float | None = None
    on_round: Callable[[Round], None] | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    answer: AnswerText = field(init=False)
    pieces: Pieces = field(init=False)
    reason: str | Exception | None = None
    stats: RowStats | None = None
    cached: int = 0
    cancelled: bool = False
    stopped: bool = False

    def begin(self, tokenizer: Any) -> None:
        """Prepare for the first token."""
        self.answer, self.pieces = AnswerText(tokenizer, self.stop), Pieces(tokenizer)

    def ends(self, token: int) -> str | None:
        """Append a token. Return why the answer ends with it, or None."""
        self.ids.append(token)
        if self.answer.add(token):
            return "stop"
        if len(self.ids) >= self.max_new_tokens or time.monotonic() > self.deadline:
            return "length"
        return "abort" if self.stopped else None

    def show(self, text: str) -> bool:
        """Send the new part of the text. Return whether the client has left."""
        new, self.text = text[len(self.text) :], text
        if new and not self.cancelled:
            self.on_update(new, None)
        return self.cancelled

    @property
    def key(self) -> object:
        """Jobs with equal keys may share a batch."""
        return self.sampling, self.penalties, self.guide

    def watch(self, round: Round) -> None:
        """Record a round, before its tokens are shown."""
        if self.on_round is not None:
            self.on_round(round)
        if self.alternatives is None:
            return
        rows = round.logits[round.path[: len(round.tokens)]].float().log_softmax(-1)
        for row, token in zip(rows, round.tokens, strict=True):
            values, ids = row.topk(min(self.alternatives, len(row)))
            best = tuple((self.pieces.of(i), v) for i, v in zip(ids.tolist(), values.tolist()))
            self.logprobs.append(Logprob(self.pieces.of(token), float(row[token]), best))
            self.pieces.add(token)

    def finish(self, reason: str | Exception) -> None:
        """End the answer: it is complete, or it failed."""
        if isinstance(reason, str):
            rest = self.answer.end()
            if rest and self.logprobs:
                last = self.logprobs[-1]
                self.logprobs[-1] = replace(last, piece=last.piece._replace(text=last.piece.text + rest))
            self.show(self.answer.text)
        self.reason = reason
        self.on_update("", self)

    def fail(self, error: Exception) -> None:
        """End the answer unless it has ended, whatever state it is in."""
        if self.reason is None:
            self.reason = error
            with suppress(Exception):
                self.on_update("", self)


class _UnwantedError(Exception):
    """No client waits for an answer of the batch any more."""


class _Served(Streaming):
    """Sends each job the new text of its answer, and asks it where the answer ends."""

    def __init__(self, batch: Sequence[AnswerJob]) -> None:
        self.batch = batch
        watched = any(job.on_round is not None or job.alternatives is not None for job in batch)
        super().__init__(self._show, (lambda row, round: batch[row].watch(round)) if watched else None)

    def on_phase(self, phase: str) -> None:
        if phase == "prefill" and all(job.cancelled or job.stopped for job in self.batch):
            raise _UnwantedError

    def on_token(self, prompt_index: int, token: int) -> str | None:
        return self.batch[prompt_index].ends(token)

    def _show(self, row: int, tokens: list[int]) -> bool:
        return self.batch[row].show(self.batch[row].answer.text)


class Batcher:
    """A queue of jobs, and the thread that decodes them.

    Args:
        decoder: target and drafter.
        max_batch: most jobs in a batch.
        max_queue: most jobs that wait.
    """

    def __init__(self, decoder: FuzzyDecoder, max_batch: int, max_queue: int) -> None:
        self.decoder, self.max_batch, self.max_queue = decoder, max_batch, max_queue
        self.waiting: deque[AnswerJob] = deque()
        self._changed = threading.Condition()
        self._running: list[AnswerJob] = []
        self._closed = False
        self._patience_ends = math.inf
        self._thread = threading.Thread(target=self._work, daemon=True, name="decode")
        self._thread.start()

    def submit(self, jobs: Sequence[AnswerJob]) -> None:
        """Queue all jobs or none. Raises UnavailableError."""
        with self._changed:
            if self._closed:
                raise UnavailableError("the server is stopping.")
            if len(self.waiting) + len(jobs) > self.max_queue:
                raise UnavailableError(
                    f"{len(self.waiting)} answers are waiting, and at most {self.max_queue} may: try again later."
                )
            self.waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[AnswerJob]) -> None:
        """Take jobs from the queue, and end those that run with their next tokens, unless they have ended."""
        with self._changed:
            for job in jobs:
                job.cancelled = job.reason is None
            self.waiting = deque(job for job in self.waiting if not job.cancelled)

    def stop(self) -> None:
        """End running answers with their next tokens and fail waiting jobs. Safe to call from a signal handler."""
        with self._changed:
            self._closed, self._patience_ends = True, time.monotonic() + PATIENCE
            for job in self._running:
                job.stopped = True
            self._changed.notify()

    @property
    def is_overdue(self) -> bool:
        """Whether answers still run some time after they were asked to end."""
        return time.monotonic() > self._patience_ends

    def close(self) -> None:
        """Stop, and wait for the decoding thread."""
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            try:
                self._decode(batch)
            except Exception as error:  # later jobs must not wait for a thread that has ended
                log.exception("decoding failed")
                for job in batch:
                    job.fail(error)
        for job in self.waiting:
            job.finish(UnavailableError("the server is stopping."))

    def _next(self) -> list[AnswerJob] | None:
        """The first waiting job with those that can share its batch; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self.waiting))
            if self._closed:
                return None
            first = self.waiting[0]
            # a batch draws in another order than a single answer, so a seeded job runs alone
            alone = first.sampling.get("seed") is not None
            batch = [job for job in self.waiting if job.key == first.key][: 1 if alone else self.max_batch]
            for job in batch:
                self.waiting.remove(job)
            self._running = batch
            return batch

    def _decode(self, batch: list[AnswerJob]) -> None:
        tokenizer, penalties = self.decoder.tokenizer, batch[0].penalties
        start = max(len(job.prompt) for job in batch)  # processors see prompts padded to the longest
        for job in batch:
            job.begin(tokenizer)
        try:
            output = self.decoder.generate(
                [{"prompt": job.prompt, "images": job.image_input} for job in batch],
                rule=[job.rule for job in batch],
                max_new_tokens=max(job.max_new_tokens for job in batch),
                callbacks=[_Served(batch)],
                guide=batch[0].guide,
                users=[job.user for job in batch],
                logits_processor=[PenaltyProcessor(penalties, start)] if penalties else None,
                **batch[0].sampling,
            )
        except _UnwantedError:
            for job in batch:
                job.finish("abort")
            return
        except Exception as error:
            # only one of them may be at fault: those that have sent nothing yet are decoded again, each alone
            again = [job for job in batch if len(batch) > 1 and not job.text and job.on_round is None]
            if not isinstance(error, FsdError):
                log.exception("decoding failed")
            for job in batch:
                if job not in again:
                    job.finish(error)
            for job in again:
                job.ids.clear()
                job.logprobs.clear()
                self._decode([job])
            return
        cached = output.stats.cached_tokens or [0] * len(batch)
        for job, stats, job.cached in zip(batch, output.stats.rows, cached, strict=True):
            job.stats = stats
            job.finish(stats.finish_reason)
