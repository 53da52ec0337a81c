"""Backends that answer prompts for training: the local target in our engine, or an OpenAI-compatible server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch
from transformers import GenerationConfig

from fsd_core.errors import DataError, FsdError
from fsd_core.openai_client import EXTENSIONS, UNSHAPED, Server, ServerError
from fsd_core.text.conversations import check_text
from fsd_core.text.encoding import Message, end_of_turn, need_tokenizer
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.decoder.requests import prepare
from fsd_infer.engine import decode
from fsd_infer.rules import parse_rule
from fsd_infer.targets.token_ids import eos_ids
from fsd_train.data.feature_recorder import FeatureRecorder
from fsd_train.data.images import ImageReader, SequenceImages
from fsd_train.data.row_encoding import MAX_ID
from fsd_train.data.sampler import stable_seed

_T = TypeVar("_T")
RULE = "exact"  # local answers follow the target's distribution with any drafter
_BROKEN = ("abort", "error")  # finish reasons of answers that a server gave up
_ENDED_BY = ("stop_reason", "matched_stop")  # vLLM's and SGLang's fields for the id that ended an answer


@dataclass(frozen=True)
class RegenerationRequest:
    """One prompt to answer.

    Attributes:
        id: id of the answer, with the suffix ``/N`` for turn N ≥ 2 of a conversation.
        messages: the conversation so far.
        prompt_ids: token ids of `fsd_core.text.encoding.encode_chat`.
        temperature, top_k, top_p: sampling; temperature 0 is greedy, top_k 0 and top_p 1 are off.
        source: origin of the prompt, for statistics.
        fields: fields of the prompt's row to keep in the answer.
        template: arguments of the chat template.
        given: the row's own answer, if any.
        rest: the following exchanges: (question, the row's own answer).
        turn: number of the turn, from 1.
        sources: the row's images, for which messages have marks (:func:`fsd_core.text.image_rows.take_images`).
        images: those of the prompt.
    """

    id: str
    messages: list[Message]
    prompt_ids: list[int]
    temperature: float
    source: str
    top_k: int = 0
    top_p: float = 1.0
    fields: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    given: Sequence[Message] = ()
    rest: tuple[tuple[list[Message], list[Message]], ...] = ()
    turn: int = 1
    sources: Sequence[Any] = ()
    images: SequenceImages | None = None

    @property
    def sampling(self) -> tuple[float, int, float]:
        return self.temperature, self.top_k, self.top_p

    @property
    def first_id(self) -> str:
        return self.id if self.turn == 1 else self.id.rpartition("/")[0]


@dataclass(frozen=True)
class Completion:
    """The target's answer: ``response_ids`` with a produced end token, ``finish_reason`` stop or length.

    ``ids_from`` is "target" if the target emitted the ids, "text" if they are encoded from its text.
    """

    job: RegenerationRequest
    response: str
    response_ids: list[int]
    finish_reason: str
    ids_from: str = "target"


class AnswerBackend(Protocol):
    """Answers batches of jobs, except ids in ``done``, and yields groups of answers to write together."""

    def answer(
        self, batches: Sequence[Sequence[RegenerationRequest]], done: set[str]
    ) -> Iterator[list[Completion]]: ...


class LocalBackend:
    """Backend of this package's engine: the target with a drafter, under the rule `exact`.

    It always generates whole batches, with a drafter without memory of earlier ones. So a resumed run has the rounding,
    trees and draws of an uninterrupted run.

    Args:
        decoder: the target with its tokenizer, and the drafter.
        max_new_tokens: most tokens of an answer.
        seed: seed of the draws, together with the batch's ids.
        features: directory of a cache for the answers' features; None: store none.

    Raises:
        FsdError: the target has no tokenizer, or the cache belongs to another target.
    """

    def __init__(
        self, decoder: FuzzyDecoder, max_new_tokens: int, seed: int, features: str | Path | None = None
    ) -> None:
        self.recorder = None if features is None else FeatureRecorder(decoder.target, features)
        self.decoder, self.tokenizer = decoder, need_tokenizer(decoder.tokenizer, decoder.target.name)
        self.rule, self.reader = parse_rule(RULE), ImageReader.of(decoder.target)
        self.max_new_tokens = max_new_tokens
        self.seed = seed

    def answer(self, batches: Sequence[Sequence[RegenerationRequest]], done: set[str]) -> Iterator[list[Completion]]:
        for batch in batches:
            if any(job.id not in done for job in batch):
                yield self._batch(batch)

    def _batch(self, batch: Sequence[RegenerationRequest]) -> list[Completion]:
        target, drafter = self.decoder.target, self.decoder.drafter
        drafter.forget()
        temperature, top_k, top_p = batch[0].sampling
        seed = stable_seed(self.seed, *(job.id for job in batch))
        drawn = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature else {}
        options = {"max_new_tokens": self.max_new_tokens, **drawn}
        request, _ = prepare(target, [job.prompt_ids for job in batch], None, options)
        if any(job.images for job in batch):
            request.image_inputs = [
                None if job.images is None else self.reader.image_input(job.prompt_ids, job.images) for job in batch
            ]
        request.generator = torch.Generator(target.device).manual_seed(seed)
        request.callbacks = [] if self.recorder is None else [self.recorder.of(request.prompts)]
        answers = decode(target, drafter, self.rule, request)
        if self.recorder is not None:
            self.recorder.save(answers.sequences, ["" if job.images is None else job.images.digest for job in batch])
        return [
            Completion(job, self.tokenizer.decode(ids, skip_special_tokens=True), ids, row.finish_reason)
            for job, ids, row in zip(batch, answers.sequences, answers.stats.rows)
        ]


class EndpointBackend:
    """Backend of OpenAI-compatible /v1/completions servers, which get prompts as token ids.

    Args:
        urls: addresses of the servers, with or without /v1. They share the requests; a faster one takes more.
        model: the server's name for the target.
        tokenizer: the target's tokenizer, for the end token and for servers that return only text.
        generation_config: the target's; its end tokens count as well as the tokenizer's eos and the chat template's end
            of turn; None: only these two.
        max_new_tokens: most tokens of an answer.
        seed: seed of each request, together with the row's id; None: send none.
        concurrency: most requests in flight.
        group: most answers per yielded group.
        attempts, pause: see :class:`fsd_core.openai_client.Server`.

    Raises:
        FsdError: an address is missing or malformed.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str,
        tokenizer: Any,
        generation_config: GenerationConfig | None,
        max_new_tokens: int,
        seed: int | None,
        concurrency: int = 64,
        group: int = 32,
        attempts: int = 6,
        pause: float = 1.0,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else urls
        self.servers = [Server(url, attempts=attempts, pause=pause, connections=concurrency) for url in addresses]
        if not self.servers:
            raise FsdError("no endpoint was given. Give an address such as http://127.0.0.1:8000/v1.")
        self.model, self.tokenizer, self.reader = model, tokenizer, None  # it sends token ids, so no images
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.concurrency, self.group = concurrency, group
        self.eos_ids, ends = end_ids(tokenizer, generation_config), end_of_turn(tokenizer)
        last = next((index for index, token in enumerate(ends) if token in self.eos_ids), len(ends))
        self.end_of_turn = ends[: last + 1]  # a server stops there

    def answer(self, batches: Sequence[Sequence[RegenerationRequest]], done: set[str]) -> Iterator[list[Completion]]:
        """Yield groups of answers, each in the order of the requests.

        After a final failure or Ctrl-C, finished answers are yielded before the error is raised. Nothing waits for
        requests in flight, not even the end of the interpreter.
        """
        jobs = [job for batch in batches for job in batch if job.id not in done]
        order = {job.id: index for index, job in enumerate(jobs)}
        pending: SimpleQueue[RegenerationRequest] = SimpleQueue()
        for job in jobs:
            pending.put(job)
        finished: SimpleQueue[Completion | BaseException] = SimpleQueue()
        for number in range(self.concurrency):
            # the interpreter joins a ThreadPoolExecutor's threads at its end, but not daemons
            server = self.servers[number % len(self.servers)]
            threading.Thread(target=self._work, args=(server, pending, finished), daemon=True).start()
        ready: list[Completion] = []
        failure: BaseException | None = None
        try:
            for _ in jobs:
                result = finished.get()
                if not isinstance(result, Completion):
                    raise result
                ready.append(result)
                if len(ready) >= self.group:
                    yield sorted(ready, key=lambda answer: order[answer.job.id])
                    ready = []
        except (Exception, KeyboardInterrupt) as error:
            failure = error
        finally:
            list(_drain(pending))  # no thread begins another one
        ready += [result for result in _drain(finished) if isinstance(result, Completion)]
        if ready:
            yield sorted(ready, key=lambda answer: order[answer.job.id])
        if failure is not None:
            raise failure

    def _work(
        self,
        server: Server,
        pending: SimpleQueue[RegenerationRequest],
        finished: SimpleQueue[Completion | BaseException],
    ) -> None:
        for job in _drain(pending):
            try:
                finished.put(self.ask(job, server))
            except BaseException as error:
                finished.put(error)

    def ask(self, job: RegenerationRequest, server: Server) -> Completion:
        """Answer one job by one server. Raises FsdError if the server refuses it or stays unreachable."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": job.prompt_ids,
            "max_tokens": self.max_new_tokens,
            "temperature": job.temperature,
            **UNSHAPED,
            "top_p": job.top_p,
        }
        extensions = {**EXTENSIONS, "top_k": job.top_k} if job.top_k else EXTENSIONS
        if job.temperature > 0 and self.seed is not None:
            body["seed"] = stable_seed(self.seed, job.id)
        try:
            reply = server.complete(body, extensions)
        except ServerError as error:
            if not error.may_pass:
                raise
            raise ServerError(
                f"{error} Finished rows are kept: repeat the command when the server is back.", error.status
            ) from error
        try:
            choice = reply["choices"][0]
            text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
            ids_from = "text" if ids is None else "target"
            if ids is None:
                ids = self.tokenizer(check_text(text, "the answer"), add_special_tokens=False)["input_ids"]
            whole = all(type(token) is int and 0 <= token <= MAX_ID for token in ids)
            if not isinstance(text, str) or not whole or reason in _BROKEN or not ids and reason != "stop":
                raise TypeError
        except (LookupError, TypeError, AttributeError, DataError) as error:
            raise FsdError(f"server {server.url} sent no completion, but {str(reply)[:200]}") from error
        prompt_ids = choice.get("prompt_token_ids")
        if prompt_ids is not None and prompt_ids != job.prompt_ids:
            raise FsdError(f"server {server.url} changed the prompt's token ids. Is {self.model!r} the target?")
        if reason == "stop":
            ids = self._ended(list(ids), choice)
        return Completion(job, text, list(ids), "stop" if reason == "stop" else "length", ids_from)

    def _ended(self, ids: list[int], choice: dict[str, Any]) -> list[int]:
        """Append the tokens that end an answer; servers omit some or all of them."""
        end_id = next((choice[field] for field in _ENDED_BY if type(choice.get(field)) is int), None)
        ends = self.end_of_turn
        if end_id is not None:
            ends = ends[: ends.index(end_id) + 1] if end_id in ends else [end_id]
        if not ends or ids and ids[-1] in {ends[-1], *self.end_of_turn[-1:], *self.eos_ids}:
            return ids
        present = next(count for count in range(len(ends), -1, -1) if ids[len(ids) - count :] == ends[:count])
        return ids + ends[present:]


def _drain(queue: SimpleQueue[_T]) -> Iterator[_T]:
    """Yield what a queue holds, which other threads may drain too."""
    with suppress(Empty):
        while True:
            yield queue.get_nowait()


def end_ids(tokenizer: Any, generation_config: GenerationConfig | None) -> set[int]:
    """Return the tokens at which servers end an answer: the tokenizer's eos and those of the generation config."""
    own = tokenizer.eos_token_id
    return eos_ids(generation_config) | (set() if own is None else {own})
