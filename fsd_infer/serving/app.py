"""The HTTP side of `fsd-infer serve`: OpenAI's completions and chat completions, and what operators ask for."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from pydantic import BaseModel, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.engine.stats import RowStats
from fsd_infer.errors import FsdError
from fsd_infer.rules import parse_rule
from fsd_infer.rules.phases import markers_of
from fsd_infer.serving.batcher import Batcher, Job, UnavailableError
from fsd_infer.targets.adapters import adapter_names


@dataclass(frozen=True)
class Limits:
    """What a request may ask for.

    Attributes:
        max_batch, max_queue: see :class:`Batcher`.
        max_new_tokens: of an answer.
        max_bytes: of a request's body.
        seconds: until an answer is cut off, waiting included.
    """

    max_batch: int = 8
    max_queue: int = 64
    max_new_tokens: int = 4096
    max_bytes: int = 1 << 20
    seconds: float = 600.0


class Asked(BaseModel):
    """What both kinds of completion share. Fields that are not named here are ignored, as other servers do."""

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    rule: str | None = None
    vllm_xargs: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class CompletionAsked(Asked):
    """POST /v1/completions."""

    prompt: str | list[int]


class ChatAsked(Asked):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)


class BodyLimit:
    """Middleware: a request's body may have so many bytes, whether it says how many it has or not."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.most:
                raise HTTPException(413, f"the request has more than {self.most} bytes.")
            return message

        await self.app(scope, counted, send)


class Metrics:
    """What /metrics tells Prometheus."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("fsd_requests", "Requests by outcome.", ["outcome"], registry=self.registry)
        self.tokens = Counter("fsd_new_tokens", "Tokens of answers.", registry=self.registry)
        self.forwards = Counter("fsd_target_forwards", "Verifying forwards of the target.", registry=self.registry)
        self.nats = Counter("fsd_divergence_nats", "Nats that lossy rules spent.", registry=self.registry)
        waiting = Gauge("fsd_waiting_requests", "Requests in the queue.", registry=self.registry)
        waiting.set_function(lambda: len(batcher.waiting))

    def add(self, stats: RowStats) -> None:
        """An answer."""
        self.tokens.inc(stats.new_tokens)
        self.forwards.inc(stats.target_forwards)
        self.nats.inc(stats.divergence_spent)


def make_app(decoder: FuzzyDecoder, rule: str = "exact", limits: Limits | None = None, api_key: str = "") -> FastAPI:
    """The application.

    Args:
        decoder: target, with a tokenizer, and drafter.
        rule: of requests that name none.
        limits: of requests.
        api_key: that requests must bring; empty: none.

    Raises:
        FsdError: an unknown rule, or a target without a tokenizer.
    """
    limits = limits or Limits()
    if decoder.tokenizer is None:
        raise FsdError(f"target {decoder.target.name} has no tokenizer: add its tokenizer files.")
    markers_of([parse_rule(rule)], decoder.tokenizer)
    adapters = adapter_names(decoder.target.model)
    batcher = Batcher(decoder, limits.max_batch, limits.max_queue)
    metrics = Metrics(batcher)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(batcher.close)

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key and not secrets.compare_digest(given.encode(), api_key.encode()):
            raise HTTPException(401, "wrong or missing API key.")

    app = FastAPI(title="fsd-infer serve", lifespan=lifespan)
    app.state.batcher = batcher
    app.add_middleware(BodyLimit, most=limits.max_bytes)
    guarded = [Depends(check)]

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status_code == 503 else None
        return _error(error.status_code, str(error.detail), headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        metrics.requests.labels("malformed").inc()
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        if first["type"] == "json_invalid":
            return _error(400, f"the body is no JSON: {first['ctx']['error']} (at character {where}).")
        if not where:
            return _error(400, "the body must be a JSON object, with the header Content-Type: application/json.")
        return _error(400, f"{where}: {first['msg']}")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", dependencies=guarded)
    async def prometheus() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(metrics.registry))

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> dict[str, Any]:
        names = [decoder.target.name, *adapters]
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "fsd-infer"} for name in names]}

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        return await answer(asked, asked.prompt, False, request)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(asked: ChatAsked, request: Request) -> Response:
        messages = [{**message, **_joined(message.get("content"))} for message in asked.messages]
        return await answer(asked, messages, True, request)

    async def answer(asked: Asked, prompt: Any, is_chat: bool, request: Request) -> Response:
        told: asyncio.Queue[tuple[str, Job | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        try:
            job = _job(decoder, asked, prompt, is_chat, rule, limits)
            if asked.model in adapters:
                job.sampling["adapter"] = asked.model

            def tell(text: str, done: Job | None) -> None:
                if done is not None and done.stats is not None:
                    metrics.add(done.stats)
                loop.call_soon_threadsafe(told.put_nowait, (text, done))

            job.tell = tell
            batcher.submit(job)
        except UnavailableError as error:
            metrics.requests.labels("refused").inc()
            raise HTTPException(503, str(error)) from error
        except FsdError as error:
            metrics.requests.labels("malformed").inc()
            raise HTTPException(400, str(error)) from error
        reply = _Reply(job.sampling.get("adapter", decoder.target.name), is_chat)

        async def parts() -> AsyncIterator[str]:
            """New text until the end; a client that went away cancels the job."""
            try:
                while True:
                    try:
                        text, done = await asyncio.wait_for(told.get(), 0.25)
                    except asyncio.TimeoutError:
                        text, done = "", None
                    if done is not None:
                        if isinstance(done.reason, Exception):
                            raise done.reason
                        return
                    if await request.is_disconnected():
                        return
                    if text:
                        yield text
            finally:
                job.cancelled = job.reason is None
                outcome = "aborted" if job.cancelled else "failed" if isinstance(job.reason, Exception) else "done"
                metrics.requests.labels(outcome).inc()

        if asked.stream:

            async def events() -> AsyncIterator[str]:
                try:
                    async for text in parts():
                        yield reply.event(text, None)
                    yield reply.event("", str(job.reason))
                    if asked.stream_options.get("include_usage"):
                        yield reply.usage_event(job)
                except Exception as error:  # the status has been sent: say it in the stream
                    yield f"data: {json.dumps({'error': {'message': _said(error)}})}\n\n"
                yield "data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        try:
            text = "".join([part async for part in parts()])
        except Exception as error:
            status = 503 if isinstance(error, UnavailableError) else 400 if isinstance(error, FsdError) else 500
            raise HTTPException(status, _said(error)) from error
        return JSONResponse(reply.whole(text, job))

    return app


def _job(decoder: FuzzyDecoder, asked: Asked, prompt: Any, is_chat: bool, rule: str, limits: Limits) -> Job:
    """Raises FsdError for what cannot be decoded."""
    ids = decoder.encode(prompt, chat=is_chat if isinstance(prompt, str) else None)
    room = decoder.target.max_positions
    most = asked.max_completion_tokens or asked.max_tokens or limits.max_new_tokens
    if room is not None and len(ids) >= room:
        raise FsdError(f"the prompt has {len(ids)} tokens, but the model has a context of {room}.")
    named = parse_rule(asked.rule or asked.vllm_xargs.get("rule") or rule)
    markers_of([named], decoder.tokenizer)  # or the batch would fail
    greedy = asked.temperature == 0
    sampling: dict[str, Any] = {"do_sample": not greedy, "top_k": None, "seed": asked.seed}
    sampling.update(temperature=None, top_p=None) if greedy else sampling.update(
        temperature=asked.temperature, top_p=asked.top_p
    )
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    deadline = time.monotonic() + limits.seconds
    new = min(most, limits.max_new_tokens, (room or most + len(ids)) - len(ids))
    return Job(ids, named, sampling, new, [text for text in stop if text], deadline, lambda text, done: None)


@dataclass
class _Reply:
    """OpenAI's envelopes."""

    model: str
    is_chat: bool

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.begun = False

    def _envelope(self, choice: dict[str, Any] | None, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        choices = [] if choice is None else [{"index": 0, "logprobs": None, **choice}]
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def event(self, text: str, reason: str | None) -> str:
        """A part of a stream."""
        role = {} if self.begun else {"role": "assistant"}
        self.begun = True
        delta = {**role, **({"content": text} if text else {})}
        part: dict[str, Any] = {"delta": delta} if self.is_chat else {"text": text}
        return f"data: {json.dumps(self._envelope({**part, 'finish_reason': reason}, True))}\n\n"

    def usage_event(self, job: Job) -> str:
        """The part of a stream that follows the last one, for clients that ask for it."""
        return f"data: {json.dumps({**self._envelope(None, True), 'usage': self._usage(job)})}\n\n"

    @staticmethod
    def _usage(job: Job) -> dict[str, int]:
        counts = {"prompt_tokens": len(job.prompt), "completion_tokens": len(job.ids)}
        return {**counts, "total_tokens": sum(counts.values())}

    def whole(self, text: str, job: Job) -> dict[str, Any]:
        """An answer that is not streamed."""
        part: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {**self._envelope({**part, "finish_reason": str(job.reason)}, False), "usage": self._usage(job)}


def _joined(content: Any) -> dict[str, str]:
    """A message's content as one text where it is a list of texts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return {"content": "".join(str(part.get("text", "")) for part in content)}
    return {}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, FsdError) else "the server failed; its log says why."
