"""The HTTP side of `fsd-infer serve`: OpenAI's completions and chat completions, the page, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from fsd_core.errors import FsdError
from fsd_core.files import jsonable
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.engine.stats import RowStats
from fsd_infer.rules import parse_rule
from fsd_infer.rules.texts import markers_of
from fsd_infer.serving.batcher import AnswerJob, Batcher, UnavailableError
from fsd_infer.serving.fields import ChatCompletionRequest, TextCompletionRequest, ViewRequest
from fsd_infer.serving.gate import ANY_HOST, Gate, error_body, error_reply, keyed, known_hosts
from fsd_infer.serving.jobs import AnyCompletionRequest, Limits, make_jobs, reader_of
from fsd_infer.serving.malformed import NESTED, explain, explain_refusal
from fsd_infer.serving.page import PageTrace, server_page
from fsd_infer.serving.replies import Reply
from fsd_infer.targets.adapters import adapter_names

Update = tuple[int, Any, bool]  # index of the answer, what it grew by, whether it ends here
_Result = TypeVar("_Result")
PREPARING = 4  # threads that encode prompts and try guides


class Metrics:
    """Counters that /metrics shows to Prometheus."""

    def __init__(self, batcher: Batcher) -> None:
        self.registry = CollectorRegistry()
        description = "Answers by outcome, and refused requests."
        self.requests = Counter("fsd_requests", description, ["outcome"], registry=self.registry)
        self.tokens = Counter("fsd_new_tokens", "Tokens of answers.", registry=self.registry)
        self.forwards = Counter("fsd_target_forwards", "Verifying forwards of the target.", registry=self.registry)
        self.nats = Counter("fsd_divergence_nats", "Nats that lossy rules spent.", registry=self.registry)
        self.quality = Histogram(
            "fsd_quality", "Quality that requests asked for; 1 is exact.",
            buckets=(0.8, 0.9, 0.95, 0.98, 0.99, 1.0), registry=self.registry,
        )  # fmt: skip
        waiting = Gauge("fsd_waiting_requests", "Requests in the queue.", registry=self.registry)
        waiting.set_function(lambda: len(batcher.waiting))

    def add(self, stats: RowStats, quality: float | None) -> None:
        """Count an answer."""
        if quality is not None:
            self.quality.observe(quality)
        self.tokens.inc(stats.new_tokens)
        self.forwards.inc(stats.target_forwards)
        self.nats.inc(stats.divergence_spent)


class Service:
    """The routes, which share a batcher and its metrics. Arguments as for :func:`make_app`."""

    def __init__(self, decoder: FuzzyDecoder, rule: str, limits: Limits) -> None:
        self.decoder, self.rule, self.limits = decoder, rule, limits
        self.adapters = adapter_names(decoder.target.model)
        self.batcher = Batcher(decoder, limits.max_batch, limits.max_queue)
        self.metrics = Metrics(self.batcher)
        self.preparing = ThreadPoolExecutor(PREPARING, "prepare")
        self.created = int(time.time())

    def close(self) -> None:
        """End running answers with their next tokens, and wait for the decoding thread."""
        self.preparing.shutdown(wait=False, cancel_futures=True)
        self.batcher.close()

    def routes(self, api_key: str) -> APIRouter:
        """Return the routes that need the key, if it is not empty."""
        router = APIRouter(route_class=keyed(api_key))
        router.add_api_route("/openapi.json", self.description)
        router.add_api_route("/metrics", self.prometheus)
        router.add_api_route("/v1/models", self.models)
        router.add_api_route("/v1/models/", self.models, include_in_schema=False)
        router.add_api_route("/v1/models/{name:path}", self.model)
        posts = {"/v1/completions": self.completions, "/v1/chat/completions": self.chat, "/view/decode": self.view}
        for path, route in posts.items():
            router.add_api_route(path, cast(Any, route), methods=["POST"], response_model=None)
        return router

    async def description(self, request: Request) -> JSONResponse:
        return JSONResponse(request.app.openapi())

    async def prometheus(self) -> PlainTextResponse:
        return PlainTextResponse(generate_latest(self.metrics.registry))

    @property
    def names(self) -> list[str]:
        """The models that requests may name, the target's own name first."""
        return [self.decoder.target.name, *self.adapters]

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(name) for name in self.names]}

    async def model(self, name: str) -> dict[str, Any]:
        self.check_model(name)
        return {"id": name, "object": "model", "created": self.created, "owned_by": "fsd-infer"}

    def check_model(self, name: str) -> None:
        """Raise HTTPException for a name that no model here has."""
        if name not in self.names:
            raise HTTPException(404, f"model {name!r:.80} is not here: this server has {', '.join(self.names)}.")

    async def completions(self, body: TextCompletionRequest, request: Request) -> Response:
        return await self.answer(body, request)

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        return await self.answer(body, request)

    async def page(self) -> HTMLResponse:
        headers = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
        return HTMLResponse(server_page(self.rule), headers=headers)

    async def view(self, body: ViewRequest, request: Request) -> Response:
        """Stream the rounds of one answer."""
        updates: asyncio.Queue[Update] = asyncio.Queue()
        (job,) = await self.jobs(TextCompletionRequest(**body.model_dump()), in_template=None)
        trace = PageTrace(self.decoder.tokenizer, job.prompt, self.decoder.drafter.proposers)
        publish = self.publisher(updates)
        job.on_round = lambda round: publish(0, trace.add(round), None)
        job.on_update = lambda text, done: None if done is None else publish(0, None, done)
        self.submit([job])

        async def events() -> AsyncIterator[str]:
            async for _, round in self.parts([job], updates, request):
                if round is not None:
                    yield _event(round)

        return Stream(events(), partial(self.release, [job]))

    async def malformed(self, request: Request, error: Exception) -> JSONResponse:
        """Answer a body that is not a valid request."""
        assert isinstance(error, RequestValidationError)
        self.metrics.requests.labels("malformed").inc()
        message, field = explain(error)
        return error_reply(400, message, param=field)

    async def answer(self, body: AnyCompletionRequest, request: Request) -> Response:
        """Return one request's answers, streamed or whole. Raises HTTPException."""
        self.check_model(body.model or self.names[0])
        updates: asyncio.Queue[Update] = asyncio.Queue()
        jobs = await self.jobs(body)
        publish = self.publisher(updates)
        for index, job in enumerate(jobs):
            if body.model in self.adapters:
                job.sampling["adapter"] = body.model
            job.on_update = partial(publish, index)
        reader = await self.in_thread(partial(reader_of, self.decoder, body))
        reply = Reply(body.model or self.names[0], isinstance(body, ChatCompletionRequest), jobs, body.n, reader)
        self.submit(jobs)
        parts = self.parts(jobs, updates, request)
        if body.stream:
            events = _events(parts, reply, body.stream_options.include_usage)
            return Stream(events, partial(self.release, jobs))
        try:
            async for _ in parts:
                pass
        except Exception as error:
            raise HTTPException(_status(error), _message(error)) from error
        finally:
            self.release(jobs)
        return JSONResponse(jsonable(reply.whole()))

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run work in another thread, since encoding a prompt or trying a guide may take seconds.

        Raises HTTPException for a request that cannot be decoded.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self.preparing, work)
        except (FsdError, RecursionError) as error:
            self.metrics.requests.labels("malformed").inc()
            message = str(error) if isinstance(error, FsdError) else NESTED
            raise HTTPException(400, message) from error

    async def jobs(self, body: AnyCompletionRequest, in_template: bool | None = False) -> list[AnswerJob]:
        """Make a job per answer, not queued yet. Raises HTTPException as :meth:`in_thread` does."""
        return await self.in_thread(partial(make_jobs, self.decoder, body, self.rule, self.limits, in_template))

    def publisher(self, updates: asyncio.Queue[Update]) -> Callable[[int, Any, AnswerJob | None], None]:
        """Return a function that brings updates from the decoding thread into the event loop's queue."""
        loop = asyncio.get_running_loop()

        def publish(index: int, new: Any, done: AnswerJob | None) -> None:
            if done is not None and done.stats is not None:
                self.metrics.add(done.stats, done.quality)
            loop.call_soon_threadsafe(updates.put_nowait, (index, new, done is not None))

        return publish

    def submit(self, jobs: Sequence[AnswerJob]) -> None:
        """Queue all jobs or none. Raises HTTPException."""
        try:
            self.batcher.submit(jobs)
        except UnavailableError as error:
            self.metrics.requests.labels("refused").inc()
            raise HTTPException(503, str(error)) from error

    async def parts(
        self, jobs: Sequence[AnswerJob], updates: asyncio.Queue[Update], request: Request
    ) -> AsyncIterator[tuple[int, Any]]:
        """Yield (index of an answer, what it grew by), and (index, None) at its end.

        Ends with the last answer, or when the client has left. Raises the exception that made a job fail.
        """
        running = len(jobs)
        while running:
            try:
                index, new, over = await asyncio.wait_for(updates.get(), 0.25)
            except asyncio.TimeoutError:
                if await request.is_disconnected():
                    return
                if self.batcher.is_overdue:
                    raise UnavailableError("the server is stopping.") from None
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

    def release(self, jobs: Sequence[AnswerJob]) -> None:
        """Count the jobs of a request that is over, and cancel those that have not ended."""
        self.batcher.cancel(jobs)
        for job in jobs:
            outcome = "aborted" if job.cancelled else "failed" if isinstance(job.reason, Exception) else "done"
            self.metrics.requests.labels(outcome).inc()


def make_app(
    decoder: FuzzyDecoder,
    rule: str = "exact",
    limits: Limits | None = None,
    api_key: str = "",
    hosts: Sequence[str] = (ANY_HOST,),
) -> FastAPI:
    """Make the application.

    Args:
        decoder: target, with a tokenizer, and drafter.
        rule: the rule of requests that name none.
        limits: bounds of requests.
        api_key: the key that requests must bring; empty: none.
        hosts: names, besides addresses and this machine's own, that a Host header may have; "*": any.

    Raises:
        FsdError: an unknown rule, a key that no header can carry, or a target without a tokenizer.
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
        await asyncio.to_thread(service.close)

    # the pages that FastAPI would add load scripts from elsewhere, and need no key
    app = FastAPI(title="fsd-infer serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.batcher = service.batcher
    app.add_middleware(Gate, most=limits.max_bytes, hosts=known_hosts(hosts))
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, service.malformed)
    app.add_api_route("/health", _health)
    app.add_api_route("/", service.page)
    app.include_router(service.routes(api_key))
    return app


class Stream(StreamingResponse):
    """A stream of events that releases its jobs when it is over, also if the client leaves before the first event."""

    def __init__(self, events: AsyncIterator[str], release: Callable[[], None]) -> None:
        super().__init__(_guarded(events), media_type="text/event-stream")
        self.release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.release()


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = {"Retry-After": "1"} if error.status_code == 503 else error.headers
    return error_reply(error.status_code, explain_refusal(request, error), dict(headers or {}))


async def _events(parts: AsyncIterator[tuple[int, Any]], reply: Reply, with_usage: bool) -> AsyncIterator[str]:
    async for index, text in parts:
        yield reply.event(index, text or "", is_over=not text)
    if with_usage:
        yield reply.usage_event()


async def _guarded(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the events and the end mark. The status is already sent, so errors become events."""
    try:
        async for event in events:
            yield event
    except Exception as error:
        yield _event(error_body(_status(error), _message(error)))
    yield "data: [DONE]\n\n"


def _event(payload: Any) -> str:
    return f"data: {json.dumps(jsonable(payload))}\n\n"


def _status(error: Exception) -> int:
    return 503 if isinstance(error, UnavailableError) else 400 if isinstance(error, FsdError) else 500


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, FsdError) else "the server failed; its log says why."
