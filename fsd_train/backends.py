"""What answers prompts for training: the target run here by transformers, or a server that speaks OpenAI's protocol."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from fsd_infer.errors import FsdError
from fsd_infer.openai_client import Server, ServerError
from fsd_infer.prompts import Message
from fsd_infer.token_ids import eos_ids, left_pad


@dataclass(frozen=True)
class Job:
    """One prompt to answer. ``prompt_ids`` come from `fsd_infer.prompts.encode_chat`."""

    id: str
    messages: list[Message]
    prompt_ids: list[int]
    temperature: float
    source: str


@dataclass(frozen=True)
class Answer:
    """What the target said: ``response_ids`` with the end token if it was produced, ``finish_reason`` stop or length.

    ``ids_from`` is "target" where the ids are those the target emitted, "text" where they were made from its text.
    """

    job: Job
    response: str
    response_ids: list[int]
    finish_reason: str
    ids_from: str = "target"


class Backend(Protocol):
    """Answers batches of jobs, yielding groups of answers to be written together; ids in ``done`` are not needed."""

    def answer(self, batches: Sequence[Sequence[Job]], done: set[str]) -> Iterator[list[Answer]]: ...


def stable_seed(*parts: object) -> int:
    """A 31-bit seed that depends on the parts alone, not on the process."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class LocalBackend:
    """Batched `generate` of the frozen target, left-padded.

    A batch is always generated whole, also when a resumed run lacks only some of its rows, so that padding, and with it
    rounding and the random draws, are those of an uninterrupted run.

    Args:
        model, tokenizer: the target.
        max_new_tokens: limit per answer.
        seed: with the batch's ids, the seed of its random draws.
    """

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int, seed: int) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.eos_ids = end_ids(tokenizer, model.generation_config)

    def answer(self, batches: Sequence[Sequence[Job]], done: set[str]) -> Iterator[list[Answer]]:
        for batch in batches:
            if any(job.id not in done for job in batch):
                yield self._batch(batch)

    @torch.inference_mode()
    def _batch(self, batch: Sequence[Job]) -> list[Answer]:
        device = self.model.device
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else min(self.eos_ids, default=0)
        ids, mask = left_pad([job.prompt_ids for job in batch], pad, device)
        temperature = batch[0].temperature
        # every shaping of the distribution is switched off: the answers are to be the target's own
        config = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else 1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=sorted(self.eos_ids) or None,
            pad_token_id=pad,
        )
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(stable_seed(self.seed, *(job.id for job in batch)))
            out = self.model.generate(ids, attention_mask=mask, generation_config=config)
        return [self._finish(job, row) for job, row in zip(batch, out[:, ids.shape[1] :].tolist())]

    def _finish(self, job: Job, tokens: list[int]) -> Answer:
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        kept = tokens if end is None else tokens[: end + 1]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Answer(job, text, kept, "length" if end is None else "stop")


class EndpointBackend:
    """OpenAI-compatible /v1/completions servers, asked with prompts as token ids.

    Args:
        urls: the servers' addresses, with or without /v1; each request goes to the least busy.
        model: the name under which it serves the target.
        tokenizer: the target's, for the end token and for servers that return text only.
        max_new_tokens: limit per answer.
        seed: with the row's id, the seed of each request; None sends none (some servers cannot seed requests).
        concurrency: requests in flight at once.
        group: answers handed out together at most.
        api_key, attempts, timeout, pause: see :class:`fsd_infer.openai_client.Server`.

    Raises:
        FsdError: no address, or one that is none.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        model: str,
        tokenizer: Any,
        max_new_tokens: int,
        seed: int | None,
        concurrency: int = 64,
        group: int = 32,
        api_key: str | None = None,
        attempts: int = 6,
        timeout: float = 600.0,
        pause: float = 1.0,
    ) -> None:
        self.servers = [
            Server(url, api_key=api_key, timeout=timeout, attempts=attempts, pause=pause, connections=concurrency)
            for url in ([urls] if isinstance(urls, str) else urls)
        ]
        if not self.servers:
            raise FsdError("no endpoint. Give an address such as http://127.0.0.1:8000/v1.")
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.concurrency, self.group = concurrency, group
        self.eos_ids = end_ids(tokenizer, None)
        self._in_flight = [0] * len(self.servers)
        self._lock = threading.Lock()

    def answer(self, batches: Sequence[Sequence[Job]], done: set[str]) -> Iterator[list[Answer]]:
        jobs = iter([job for batch in batches for job in batch if job.id not in done])
        pool = ThreadPoolExecutor(self.concurrency)
        running: set[Future[Answer]] = set()
        finished: list[Answer] = []
        try:
            while True:
                for job in jobs:
                    running.add(pool.submit(self._dispatch, job))
                    if len(running) >= 2 * self.concurrency:
                        break
                if not running:
                    break
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    finished.append(future.result())
                if len(finished) >= self.group:
                    yield finished
                    finished = []
        except FsdError:
            if finished:  # a request failed for good: what was answered so far is kept
                yield finished
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        if finished:
            yield finished

    def _dispatch(self, job: Job) -> Answer:
        with self._lock:
            which = self._in_flight.index(min(self._in_flight))
            self._in_flight[which] += 1
        try:
            return self.ask(job, self.servers[which])
        finally:
            with self._lock:
                self._in_flight[which] -= 1

    def ask(self, job: Job, server: Server) -> Answer:
        """Answers one job by one server. Raises FsdError if the server refuses it or stays unreachable."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": job.prompt_ids,
            "max_tokens": self.max_new_tokens,
            "temperature": job.temperature,
            "top_p": 1.0,
            "return_token_ids": True,
        }
        if job.temperature > 0 and self.seed is not None:
            body["seed"] = stable_seed(self.seed, job.id)
        try:
            reply = server.complete(body)
        except ServerError as error:
            if not error.may_pass:
                raise
            raise ServerError(
                f"{error} Finished rows are kept: when the server is back, run the same command again.", error.status
            ) from error
        try:
            choice = reply["choices"][0]
            text, reason, ids = choice["text"], choice["finish_reason"], choice.get("token_ids")
        except (KeyError, IndexError, TypeError) as error:
            raise FsdError(f"server {server.url}: the reply is not a completion: {str(reply)[:200]}") from error
        seen = choice.get("prompt_token_ids")
        if seen is not None and seen != job.prompt_ids:
            raise FsdError(f"server {server.url} changed the prompt's token ids; is {self.model!r} the target?")
        ids_from = "target"
        if ids is None:
            ids, ids_from = list(self.tokenizer(text, add_special_tokens=False)["input_ids"]), "text"
        if reason == "stop" and self.eos_ids and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self.tokenizer.eos_token_id]  # some servers keep the end token to themselves
        return Answer(job, text, list(ids), "stop" if reason == "stop" else "length", ids_from)


def end_ids(tokenizer: Any, generation_config: GenerationConfig | None) -> set[int]:
    """The tokens that end an answer: the tokenizer's eos and all that the target's generation config names."""
    own = tokenizer.eos_token_id
    return eos_ids(generation_config) | (set() if own is None else {own})
