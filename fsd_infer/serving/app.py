"""The HTTP side of `fsd-infer serve`: OpenAI's completions and chat completions, the page, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn
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
from fsd_infer.rules.texts import markers_of
from fsd_infer.serving.batcher import Batcher, Job, UnavailableError
from fsd_infer.serving.fields import UNSUPPORTED, ChatAsked, CompletionAsked, ViewAsked
from fsd_infer.serving.jobs import Completion, Limits, make_jobs, reader_of
from fsd_infer.serving.page import Trace, server_page
from fsd_infer.serving.replies import Reply
from fsd_infer.targets.adapters import adapter_names

News = tuple[int, Any, bool]  # index of the answer, what it grew by, whether it ends here


class Metrics:
    """Counters that /metrics shows to Prometheus."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("fsd_requests", "Requests by outcome.", ["outcome"], registry=self.registry)
        self.tokens = Counter("fsd_new_tokens", "Tokens of answers.", registry=self.registry)
        self.forwards = Counter("fsd_target_forwards", "Verifying forwards of the target.", registry=self.registry)
        self.nats = Counter("fsd_divergence_nats", "Nats that lossy rules spent.", registry=self.registry)
        waiting = Gauge("fsd_waiting_requests", "Requests in the queue.", registry=self.registry)
        waiting.set_function(lambda: len(batcher.waiting))

    def add(self, stats: RowStats) -> None:
        """Count an answer."""
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
        """Return the routes that need a key if the server has one."""
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
        return await self.answer(asked, request)

    async def chat(self, asked: ChatAsked, request: Request) -> Response:
        return await self.answer(asked, request)

    async def page(self) -> HTMLResponse:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        return HTMLResponse(server_page(self.rule), headers=headers)

    async def view(self, asked: ViewAsked, request: Request) -> Response:
        """Stream the rounds of one answer."""
        news: asyncio.Queue[News] = asyncio.Queue()
        (job,) = self.jobs(CompletionAsked(**asked.model_dump()), in_template=None)
        trace = Trace(self.decoder.tokenizer, job.prompt, self.decoder.drafter.proposers)
        tell = self.teller(news)
        job.on_round = lambda round: tell(0, trace.add(round), None)
        job.tell = lambda text, done: None if done is None else tell(0, None, done)
        self.submit([job])

        async def events() -> AsyncIterator[str]:
            async for _, round in self.parts([job], news, request):
                if round is not None:
                    yield _event(round)

        return StreamingResponse(_guarded(events()), media_type="text/event-stream")

    async def malformed(self, request: Request, error: Exception) -> JSONResponse:
        """Answer a body that is no valid request."""
        assert isinstance(error, RequestValidationError)
        self.metrics.requests.labels("malformed").inc()
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        if first["type"] == "json_invalid":
            return _error(400, f"the body is no JSON: {first['ctx']['error']} (at character {where}).")
        if first["type"] == UNSUPPORTED:
            message = f"{where}: this server does not support it. Leave it out; docs/serving.md lists what it supports."
            return _error(400, message)
        if first["type"] == "value_error":
            return _error(400, str(first["ctx"]["error"]))
        if not where:
            return _error(400, "the body must be a JSON object, with the header Content-Type: application/json.")
        return _error(400, f"{where}: {first['msg']}")

    async def answer(self, asked: Completion, request: Request) -> Response:
        """Return one request's answers, streamed or whole. Raises HTTPException."""
        names = [self.decoder.target.name, *self.adapters]
        if asked.model not in ("", *names):
            raise HTTPException(404, f"model {asked.model!r:.80} is not here: this server has {', '.join(names)}.")
        news: asyncio.Queue[News] = asyncio.Queue()
        jobs = self.jobs(asked)
        tell = self.teller(news)
        for index, job in enumerate(jobs):
            if asked.model in self.adapters:
                job.sampling["adapter"] = asked.model
            job.tell = partial(tell, index)
        self.submit(jobs)
        reply = Reply(asked.model or names[0], isinstance(asked, ChatAsked), jobs, reader_of(self.decoder, asked))
        parts = self.parts(jobs, news, request)
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

    def jobs(self, asked: Completion, in_template: bool | None = False) -> list[Job]:
        """Make a job per answer, not queued yet. Raises HTTPException for a request that cannot be decoded."""
        try:
            return make_jobs(self.decoder, asked, self.rule, self.limits, in_template)
        except FsdError as error:
            self.metrics.requests.labels("malformed").inc()
            raise HTTPException(400, str(error)) from error

    def teller(self, news: asyncio.Queue[News]) -> Callable[[int, Any, Job | None], None]:
        """Return a function that brings news from the decoding thread into the event loop's queue."""
        loop = asyncio.get_running_loop()

        def tell(index: int, new: Any, done: Job | None) -> None:
            if done is not None and done.stats is not None:
                self.metrics.add(done.stats)
            loop.call_soon_threadsafe(news.put_nowait, (index, new, done is not None))

        return tell

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all jobs or none. Raises HTTPException."""
        try:
            self.batcher.submit(jobs)
        except UnavailableError as error:
            self.metrics.requests.labels("refused").inc()
            raise HTTPException(503, str(error)) from error

    async def parts(
        self, jobs: Sequence[Job], news: asyncio.Queue[News], request: Request
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (index of an answer, what it grew by), and (index, None) at its end, until all answers have ended.

        A client that disconnects cancels the jobs. Raises the exception that made a job fail.
        """
        running = len(jobs)
        try:
            while running:
                try:
                    index, new, over = await asyncio.wait_for(news.get(), 0.25)
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
    """Make the application.

    Args:
        decoder: target, with a tokenizer, and drafter.
        rule: of requests that name none.
        limits: of requests.
        api_key: the key that requests must bring; empty: none.

    Raises:
        FsdError: an unknown rule, or a target without a tokenizer.
    """
    parse_rule(rule)
    limits = limits or Limits()
    if decoder.tokenizer is None:
        raise FsdError(f"target {decoder.target.name} has no tokenizer: add its tokenizer files.")
    markers_of([parse_rule(rule)], decoder.tokenizer)
    service = Service(decoder, rule, limits)

    @contextlib.asynccontextmanager
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


class BodyLimit:
    """Middleware that refuses bodies of more than ``most`` bytes, whether or not the request states its length."""

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
                raise HTTPException(413, f"the request has more than {self.most} bytes. Send a shorter one.")
            return message

        await self.app(scope, counted, send)


class _Server(uvicorn.Server):
    """A server that prints its address when it starts, and ends running answers when it is interrupted."""

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"listening on http://{self.config.host}:{self.config.port}/v1, until Ctrl-C", flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.batcher.stop()  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until the process is interrupted. Running answers are then sent as far as they have come."""
    with contextlib.suppress(KeyboardInterrupt):
        _Server(uvicorn.Config(app, host=host, port=port, log_level="warning")).run()


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = {"Retry-After": "1"} if error.status_code == 503 else None
    return _error(error.status_code, str(error.detail), headers)


async def _events(parts: AsyncIterator[tuple[int, Any]], reply: Reply, with_usage: bool) -> AsyncIterator[str]:
    async for index, text in parts:
        yield reply.event(index, text or "", is_over=not text)
    if with_usage:
        yield reply.usage_event()


async def _guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """A stream with its end. The status is sent already, so the stream itself reports an error."""
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield _event({"error": {"message": _message(error)}})
    yield "data: [DONE]\n\n"


def _event(what: Any) -> str:
    return f"data: {json.dumps(jsonable(what))}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, FsdError) else "the server failed; its log says why."
