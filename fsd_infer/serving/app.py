"""The HTTP side of `fsd-infer serve`: OpenAI's completions and chat completions, the page, what operators ask for."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.engine.stats import RowStats
from fsd_infer.errors import FsdError
from fsd_infer.files import jsonable
from fsd_infer.rules import parse_rule
from fsd_infer.rules.phases import markers_of
from fsd_infer.serving.adjust import Adjustment
from fsd_infer.serving.batcher import Batcher, Job, UnavailableError
from fsd_infer.serving.fields import UNSUPPORTED, Asked, ChatAsked, CompletionAsked, ViewAsked
from fsd_infer.serving.page import server_page
from fsd_infer.serving.replies import Reply
from fsd_infer.serving.trace import Trace
from fsd_infer.targets.adapters import adapter_names

Said = tuple[int, Any, bool]  # which answer, what is new of it, is it over


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


class Service:
    """The routes, which share a batcher and its metrics. Arguments as of :func:`make_app`."""

    def __init__(self, decoder: FuzzyDecoder, rule: str, limits: Limits) -> None:
        self.decoder, self.rule, self.limits = decoder, rule, limits
        self.adapters = adapter_names(decoder.target.model)
        self.batcher = Batcher(decoder, limits.max_batch, limits.max_queue)
        self.metrics = Metrics(self.batcher)

    def routes(self) -> APIRouter:
        """Those that need a key where there is one."""
        router = APIRouter()
        router.add_api_route("/metrics", self.prometheus)
        router.add_api_route("/v1/models", self.models)
        posts = {"/v1/completions": self.completions, "/v1/chat/completions": self.chat, "/view/decode": self.view}
        for path, route in posts.items():
            router.add_api_route(path, cast(Any, route), methods=["POST"], response_model=None)
        return router

    async def prometheus(self) -> PlainTextResponse:
        return PlainTextResponse(generate_latest(self.metrics.registry))

    async def models(self) -> dict[str, Any]:
        names = [self.decoder.target.name, *self.adapters]
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "fsd-infer"} for name in names]}

    async def completions(self, asked: CompletionAsked, request: Request) -> Response:
        return await self.answer(asked, asked.prompt, False, request)

    async def chat(self, asked: ChatAsked, request: Request) -> Response:
        messages = [{**message, **_joined(message.get("content"))} for message in asked.messages]
        return await self.answer(asked, messages, True, request)

    async def page(self) -> HTMLResponse:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        return HTMLResponse(server_page(self.rule), headers=headers)

    async def view(self, asked: ViewAsked, request: Request) -> Response:
        """The rounds of one answer, as they are decoded."""
        said: asyncio.Queue[Said] = asyncio.Queue()
        whole = CompletionAsked(prompt=asked.prompt, **asked.model_dump(exclude={"prompt"}))
        (job,) = self.jobs(whole, asked.prompt, None)
        trace = Trace(self.decoder.tokenizer, job.prompt, self.decoder.drafter.proposers)
        tell = self.teller(said)
        job.on_round = lambda round: tell(0, trace.add(round), None)
        job.tell = lambda text, done: None if done is None else tell(0, None, done)
        self.submit([job])

        async def events() -> AsyncIterator[str]:
            async for _, round in self.parts([job], said, request):
                if round is not None:
                    yield _event(round)

        return StreamingResponse(_guarded(events()), media_type="text/event-stream")

    async def malformed(self, request: Request, error: Exception) -> JSONResponse:
        """The answer to a body that is no such request."""
        assert isinstance(error, RequestValidationError)
        self.metrics.requests.labels("malformed").inc()
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        if first["type"] == "json_invalid":
            return _error(400, f"the body is no JSON: {first['ctx']['error']} (at character {where}).")
        if first["type"] == UNSUPPORTED:
            return _error(
                400, f"{where}: this server does not support it. Leave it out; docs/serving.md lists what it does."
            )
        if first["type"] == "value_error":
            return _error(400, str(first["ctx"]["error"]))
        if not where:
            return _error(400, "the body must be a JSON object, with the header Content-Type: application/json.")
        return _error(400, f"{where}: {first['msg']}")

    async def answer(self, asked: Asked, prompt: Any, is_chat: bool, request: Request) -> Response:
        """One request's answers, streamed or whole. Raises HTTPException."""
        names = [self.decoder.target.name, *self.adapters]
        if asked.model not in ("", *names):
            raise HTTPException(404, f"model {asked.model!r:.80} is not here: this server has {', '.join(names)}.")
        said: asyncio.Queue[Said] = asyncio.Queue()
        jobs = self.jobs(asked, prompt, is_chat)
        tell = self.teller(said)
        for index, job in enumerate(jobs):
            if asked.model in self.adapters:
                job.sampling["adapter"] = asked.model
            job.tell = partial(tell, index)
        self.submit(jobs)
        reply = Reply(asked.model or names[0], is_chat, jobs)
        parts = self.parts(jobs, said, request)
        if asked.stream:
            events = _events(parts, reply, asked.stream_options.include_usage)
            return StreamingResponse(_guarded(events), media_type="text/event-stream")
        try:
            async for _ in parts:
                pass
        except Exception as error:
            status = 503 if isinstance(error, UnavailableError) else 400 if isinstance(error, FsdError) else 500
            raise HTTPException(status, _message(error)) from error
        return JSONResponse(jsonable(reply.whole()))

    def jobs(self, asked: Asked, prompt: Any, is_chat: bool | None) -> list[Job]:
        """A job per answer, not queued. Raises HTTPException for what cannot be decoded."""
        try:
            return _jobs(self.decoder, asked, prompt, is_chat, self.rule, self.limits)
        except FsdError as error:
            self.metrics.requests.labels("malformed").inc()
            raise HTTPException(400, str(error)) from error

    def teller(self, said: asyncio.Queue[Said]) -> Callable[[int, Any, Job | None], None]:
        """Puts what the decoding thread says into the queue of the event loop."""
        loop = asyncio.get_running_loop()

        def tell(index: int, new: Any, done: Job | None) -> None:
            if done is not None and done.stats is not None:
                self.metrics.add(done.stats)
            loop.call_soon_threadsafe(said.put_nowait, (index, new, done is not None))

        return tell

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of them or none. Raises HTTPException."""
        try:
            self.batcher.submit(jobs)
        except UnavailableError as error:
            self.metrics.requests.labels("refused").inc()
            raise HTTPException(503, str(error)) from error

    async def parts(
        self, jobs: Sequence[Job], said: asyncio.Queue[Said], request: Request
    ) -> AsyncIterator[tuple[int, Any]]:
        """What is new of which answer, until all are over: at its end None. A client that went away cancels the jobs.
        Raises what made one fail.
        """
        running = len(jobs)
        try:
            while running:
                try:
                    index, new, over = await asyncio.wait_for(said.get(), 0.25)
                except asyncio.TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                if new:
                    yield index, new
                if over:
                    reason = jobs[index].reason
                    if isinstance(reason, Exception):
                        raise reason
                    running -= 1
                    yield index, None
                elif await request.is_disconnected():
                    return
        finally:
            for job in jobs:
                job.cancelled = job.reason is None
                outcome = "aborted" if job.cancelled else "failed" if isinstance(job.reason, Exception) else "done"
                self.metrics.requests.labels(outcome).inc()


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
    parse_rule(rule)
    limits = limits or Limits()
    if decoder.tokenizer is None:
        raise FsdError(f"target {decoder.target.name} has no tokenizer: add its tokenizer files.")
    markers_of([parse_rule(rule)], decoder.tokenizer)
    service = Service(decoder, rule, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.close)

    async def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key and not secrets.compare_digest(given.encode(), api_key.encode()):
            raise HTTPException(401, "wrong or missing API key.")

    app = FastAPI(title="fsd-infer serve", lifespan=lifespan)
    app.state.batcher = service.batcher
    app.add_middleware(BodyLimit, most=limits.max_bytes)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, service.malformed)
    app.add_api_route("/health", _health)
    app.add_api_route("/", service.page)
    app.include_router(service.routes(), dependencies=[Depends(check_key)])
    return app


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = {"Retry-After": "1"} if error.status_code == 503 else None
    return _error(error.status_code, str(error.detail), headers)


async def _events(parts: AsyncIterator[tuple[int, Any]], reply: Reply, with_usage: bool) -> AsyncIterator[str]:
    async for index, text in parts:
        yield reply.event(index, text or "", None if text else str(reply.jobs[index].reason))
    if with_usage:
        yield reply.usage_event()


async def _guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream with its end. The status has been sent: what goes wrong now is said in the stream."""
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield _event({"error": {"message": _message(error)}})
    yield "data: [DONE]\n\n"


def _event(what: Any) -> str:
    return f"data: {json.dumps(jsonable(what))}\n\n"


def _jobs(
    decoder: FuzzyDecoder, asked: Asked, prompt: Any, is_chat: bool | None, rule: str, limits: Limits
) -> list[Job]:
    """Raises FsdError for what cannot be decoded."""
    ids = decoder.encode(prompt, chat=is_chat if isinstance(prompt, str) else None)
    room = decoder.target.max_positions
    most = asked.most_tokens or limits.max_new_tokens
    if room is not None and len(ids) >= room:
        raise FsdError(f"the prompt has {len(ids)} tokens, but the model has a context of {room}.")
    greedy = asked.temperature == 0
    sampling: dict[str, Any] = {"do_sample": not greedy, "top_k": None, "temperature": None, "top_p": None}
    if not greedy:
        sampling.update(temperature=asked.temperature, top_p=asked.top_p)
    named = parse_rule(asked.rule or asked.vllm_xargs.rule or rule)
    markers_of([named], decoder.tokenizer)  # or the batch would fail
    adjustment = Adjustment(tuple(asked.logit_bias.items()), asked.presence_penalty, asked.frequency_penalty)
    adjustment.check(decoder.target.vocab_size)
    guides = asked.guides
    if len(guides) > 1:
        raise FsdError(
            "an answer follows one of response_format, guided_json, guided_regex and guided_grammar: name one."
        )
    return [
        Job(
            prompt=ids,
            rule=named,
            sampling={**sampling, "seed": None if asked.seed is None else (asked.seed + index) % 2**63},
            max_new_tokens=min(most, limits.max_new_tokens, (room or most + len(ids)) - len(ids)),
            stop=[text for text in asked.stop if text],
            deadline=time.monotonic() + limits.seconds,
            tell=lambda text, done: None,
            adjustment=adjustment,
            guide=guides[0] if guides else None,
            user=asked.user,
            alternatives=asked.logprobs_asked,
        )
        for index in range(asked.n)
    ]


def _joined(content: Any) -> dict[str, str]:
    """A message's content as one text where it is a list of texts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return {"content": "".join(str(part.get("text", "")) for part in content)}
    return {}


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, FsdError) else "the server failed; its log says why."
