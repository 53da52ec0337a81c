"""`fsd-infer serve` against clients that stall, leave, bring no key or name another host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import pytest
from fastapi.testclient import TestClient

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.serving.app import Limits, make_app
from fsd_infer.serving.batcher import AnswerJob, Batcher
from fsd_infer.serving.gate import is_known, known_hosts
from fsd_infer.serving.listen import Connection, serve
from tests.serve_toys import CHAT, COMPLETIONS, LIMITS, ask, asked, connections, listening, make_job, rest

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = {
    "nothing": b"", "part of a line": b"POST /v1/ch", "part of the headers": HEAD,
    "part of a body": HEAD + b"Content-Length: 100\r\n\r\n{",
    "no body": HEAD + b"Content-Length: 100\r\n\r\n",
    "part of a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n50\r\n{",
    "a request and a part": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD + b"Content-Length: 9\r\n\r\n{",
    "a body that nobody reads": b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
}  # fmt: skip
GARBAGE = [  # what is no request, or says too much
    b"PRI * HTTP/2.0\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"[" * 3000, HEAD + b": \r\n\r\n", HEAD + b"X: " + b"x" * 9000,
    HEAD + b"Content-Length: -1\r\n\r\n{", HEAD + b"Expect: 100-continue\r\nContent-Length: 9000\r\n\r\n\xff",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
    HEAD + b"Upgrade: websocket\r\nContent-Length: 7\r\n\r\n{",
]  # fmt: skip


def health(port: int) -> bytes:
    with connections(port, [b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"]) as [one]:
        return rest(one)


def test_half_requests_end_in_time(toy_decoder: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered or closed, and the server ends while others are open."""
    sent, answered = [*HALVES.values(), *GARBAGE], ("a request and a part", "a body that nobody reads")
    with ExitStack() as held:
        with listening(make_app(toy_decoder)) as port:
            monkeypatch.setattr(Connection, "request_seconds", 0.3)
            with connections(port, sent) as opened:
                assert health(port).startswith(b"HTTP/1.1 200")
                for one, data, name in zip_longest(opened, sent, HALVES):
                    said = rest(one)
                    assert not said or (said.startswith(b"HTTP/1.1 ") and b" 500 " not in said), (data, said)
                    assert name is None or (b" 408 " in said) == (name not in answered[1:]), (name, said)
                    assert name not in answered or said.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))
                assert health(port).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(Connection, "request_seconds", 60)
            held.enter_context(connections(port, sent))


def test_head_is_get_without_the_body(toy_decoder: FuzzyDecoder) -> None:
    paths = {"/health": b"200", "/": b"200", "/v1/models": b"200", COMPLETIONS: b"405", "/nothing": b"404"}
    asking = [f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode() for path in paths]
    with listening(make_app(toy_decoder)) as port, connections(port, asking) as opened:
        for one, status in zip(opened, paths.values(), strict=True):
            head, _, body = rest(one).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status) and b"content-length: " in head and not body


def test_a_client_that_reads_nothing_is_cut_off(toy_decoder: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = threading.Event()
    end = Connection.connection_lost

    def connection_lost(self: Connection, error: Exception | None) -> None:
        end(self, error)
        lost.set()

    monkeypatch.setattr(Connection, "read_seconds", 0.1)
    monkeypatch.setattr(Connection, "connection_lost", connection_lost)
    with listening(make_app(toy_decoder)) as port:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(60)
        one.connect(("127.0.0.1", port))
        with suppress(ConnectionError):
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        assert lost.wait(60)
        one.close()
        assert health(port).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_not_the_process(toy_decoder: FuzzyDecoder, number: signal.Signals) -> None:
    """Running answers are sent as far as they have come, and the command ends with status 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    raised, said, begun, real = list[int](), list[bytes](), threading.Event(), toy_decoder.target.forward
    body = json.dumps(asked(max_tokens=200, stream=True)).encode()
    request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def slow(*args: Any, **more: Any) -> Any:
        begun.set()
        time.sleep(0.02)
        return real(*args, **more)

    def client() -> None:
        while not said:
            with suppress(ConnectionRefusedError), connections(port, [request]) as [one]:
                assert begun.wait(60)
                os.kill(os.getpid(), number)
                said.append(rest(one))

    before = signal.signal(number, lambda number, frame: raised.append(number))
    thread = threading.Thread(target=client)
    try:
        with patch.object(toy_decoder.target, "forward", slow):
            thread.start()
            serve(make_app(toy_decoder), "127.0.0.1", port)
            thread.join(60)
    finally:
        signal.signal(number, before)
    assert not raised and b'"finish_reason": "abort"' in said[0] and said[0].rstrip(b"\r\n0").endswith(b"[DONE]")


def test_an_answer_that_does_not_end_does_not_hold_the_end(toy_decoder: FuzzyDecoder, monkeypatch: Any) -> None:
    begun, go, said = threading.Event(), threading.Event(), list[str]()
    real = toy_decoder.generate

    def stuck(*args: Any, **more: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return real(*args, **more)

    monkeypatch.setattr(toy_decoder, "generate", stuck)
    monkeypatch.setattr("fsd_infer.serving.batcher.PATIENCE", 0.1)
    app = make_app(toy_decoder)
    with TestClient(app) as client:
        thread = threading.Thread(target=lambda: said.append(client.post(CHAT, json=asked(stream=True)).text))
        thread.start()
        assert begun.wait(60)
        app.state.batcher.stop()
        thread.join(60)
        go.set()
    first, last = said[0].split()[1:-2], said[0].split()[-1]
    assert json.loads(" ".join(first))["error"]["code"] == 503 and last == "[DONE]"


def two_jobs(decoder: FuzzyDecoder, new: int) -> tuple[list[AnswerJob], Callable[[], bool]]:
    """Two answers of ``new`` tokens, and what waits until both have ended."""
    ended = [threading.Event(), threading.Event()]
    jobs = [make_job(decoder, new, lambda text, job, done=done: done.set() if job else None) for done in ended]
    return jobs, lambda: all(done.wait(60) for done in ended)


@pytest.mark.parametrize("left", [1, 2])
def test_prompts_that_nobody_waits_for_are_not_read_on(toy_decoder: FuzzyDecoder, monkeypatch: Any, left: int) -> None:
    """Of two clients of a batch one or both leave while the first prompt is read."""
    monkeypatch.setattr("fsd_infer.request.prompts.PREFILL_CHUNK", 4)
    forwards, real, (jobs, all_ended) = list[int](), toy_decoder.target.forward, two_jobs(toy_decoder, 2)

    def leave(*args: Any, **more: Any) -> Any:
        forwards.append(1)
        batcher.cancel(jobs[:left])
        return real(*args, **more)

    monkeypatch.setattr(toy_decoder.target, "forward", leave)
    with closing(Batcher(toy_decoder, max_batch=2, max_queue=4)) as batcher:
        batcher.submit(jobs)
        assert all_ended()
    if left == 2:
        assert len(forwards) == 1 and jobs[1].reason == "abort" and not jobs[1].ids
    else:
        assert jobs[1].reason == "length" and len(jobs[1].ids) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/view/decode"])
def test_clients_that_leave_at_once_leave_nothing_behind(toy_decoder: FuzzyDecoder, path: str, stream: bool) -> None:
    app = make_app(toy_decoder, "exact", LIMITS)
    batcher: Batcher = app.state.batcher
    started, go = threading.Event(), threading.Event()

    def slow(text: str, done: AnswerJob | None) -> None:
        started.set()
        assert go.wait(60)

    batcher.submit([make_job(toy_decoder, 4, slow)])
    assert started.wait(60)
    body = asked(stream=stream) if path == CHAT else {"prompt": "the cat"}

    async def several() -> None:
        await asyncio.gather(*(ask(app, path, [json.dumps(body).encode()], leaves=True) for _ in range(8)))

    asyncio.run(several())
    assert not batcher.waiting
    go.set()
    batcher.close()


def named(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), *((name.encode(), text.encode()) for name, text in headers.items())]


def test_more_answers_than_the_queue_holds_are_malformed(toy_decoder: FuzzyDecoder) -> None:
    with TestClient(make_app(toy_decoder, limits=Limits(max_queue=2))) as client:
        found = client.post(CHAT, json=asked(n=3))
        assert found.status_code == 400 and "at most 2 answers at once" in found.json()["error"]["message"]
        assert client.post(CHAT, json=asked(n=2)).status_code == 200


def test_the_key_comes_before_the_body(toy_decoder: FuzzyDecoder) -> None:
    app = make_app(toy_decoder, api_key="sesame")
    parts = [b"{", b"}"]
    for path in (CHAT, COMPLETIONS, "/view/decode"):
        for header in ("", "sesame", "Bearer", "Bearer x", "Basic sesame", "Bearer sésame", "Bearersesame"):
            status, said = asyncio.run(ask(app, path, parts, headers=named(authorization=header)))
            assert (status, len(parts)) == (401, 2) and b"API key" in said
    with TestClient(app) as client:
        for scheme in ("Bearer", "bearer", "BEARER"):
            key = {"Authorization": f"{scheme} sesame"}
            assert client.post(CHAT, json=asked(max_tokens=2), headers=key).status_code == 200
            described = client.get("/openapi.json", headers=key).json()
            assert CHAT in described["paths"] and "ChatCompletionRequest" in described["components"]["schemas"]
        assert {client.get(path).status_code for path in ("/openapi.json", "/metrics")} == {401}
        assert client.get("/health").status_code == 200
        assert client.get("/v1/nothing").json()["error"]["code"] == 404
        assert client.get("/openapi.json").headers["WWW-Authenticate"] == "Bearer"
        assert {client.get(path).status_code for path in ("/docs", "/redoc", "/docs/oauth2-redirect")} == {404}
    for key in ("sésame", "two words", "x\n", "\x7f"):
        with pytest.raises(FsdError, match="FSD_API_KEY"):
            make_app(toy_decoder, api_key=key)


@pytest.mark.parametrize(("host", "known"), [
    ("localhost:8000", True), ("LOCALHOST", True), ("a.localhost:1", True), ("127.0.0.1:8000", True), ("", True),
    ("[::1]:8000", True), ("10.0.0.7", True), ("mine.example:80", True), ("Mine.Example.", True),
    (socket.gethostname(), True), ("evil.example:8000", False), ("localhost.evil.example", False),
    ("127.0.0.1.evil.example", False), ("[evil]", False), ("mine.example.evil", False), ("::1", False),
])  # fmt: skip
def test_pages_of_other_sites_cannot_ask(host: str, known: bool) -> None:
    """A name that an attacker resolves to this machine is refused, unless every name is allowed."""
    assert is_known(host, known_hosts(["127.0.0.1", "mine.example"])) == known
    assert is_known(host, known_hosts(["*"]))


def test_another_host_is_refused_before_its_body(toy_decoder: FuzzyDecoder) -> None:
    app, parts = make_app(toy_decoder, hosts=["127.0.0.1"]), [b"{", b"}"]
    status, said = asyncio.run(ask(app, CHAT, parts, headers=named(host="evil.example")))
    assert (status, len(parts)) == (403, 2) and b"--allow-host" in said
    app.state.batcher.close()


DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize("fields", [
    '"rule": "' + "x" * 3000 + '"', '"' + "y" * 3000 + '": 1', '"rule": "\\ud800"', '"model": "\\ud800"',
    '"guided_regex": "(' + "\\ud800" * 300 + '"', f'"guided_json": {{"const": {DEEP}}}', f'"rule": {DEEP}',
    '"seed": 1' + "0" * 3000, '"guided_json": {"minimum": 1' + "0" * 3000 + "}", '"seed": 1e999', '"stop": ' + DEEP,
    '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": ' + DEEP + "}}}]",
    '"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": '
    + DEEP + "}}}]",
    f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {{"items": {DEEP}}}}}}}',
    '"\\ud800": 1', "[" * 3000, '"a": ' + '{"a": ' * 600,
])  # fmt: skip
def test_errors_are_short_whatever_they_quote(client: TestClient, fields: str) -> None:
    body = '{"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2, ' + fields + "}"
    found = client.post(CHAT, content=body.encode(), headers={"Content-Type": "application/json"})
    assert found.status_code in (400, 404) and len(found.content) < 1500, found.text
    assert found.json()["error"]["message"]


def test_prompts_are_encoded_beside_the_event_loop(toy_decoder: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, go, found = toy_decoder.encode, threading.Event(), threading.Event(), list[int]()

    def slow(prompt: Any, **options: Any) -> list[int]:
        begun.set()
        assert go.wait(60)
        return encode(prompt, **options)

    monkeypatch.setattr(toy_decoder, "encode", slow)
    with TestClient(make_app(toy_decoder)) as client:
        body = {"prompt": "the cat", "max_tokens": 2}
        thread = threading.Thread(target=lambda: found.append(client.post(COMPLETIONS, json=body).status_code))
        thread.start()
        assert begun.wait(60)
        assert client.get("/health").status_code == 200
        go.set()
        thread.join(60)
    assert found == [200]


def test_the_decoding_thread_outlives_what_nobody_expects(toy_decoder: FuzzyDecoder, monkeypatch: Any) -> None:
    """A fault outside of the decoder ends its own job alone."""
    ended, finish, broken = threading.Event(), AnswerJob.finish, make_job(toy_decoder, 4, lambda text, job: None)
    monkeypatch.setattr(AnswerJob, "finish", lambda self, reason: 1 / 0 if self is broken else finish(self, reason))
    sound = make_job(toy_decoder, 4, lambda text, job: ended.set() if job is not None else None)
    with closing(Batcher(toy_decoder, max_batch=1, max_queue=4)) as batcher:
        batcher.submit([broken])
        batcher.submit([sound])
        assert ended.wait(60)
    assert sound.reason == "length" and isinstance(broken.reason, ZeroDivisionError)


def test_an_answer_that_fails_fails_alone(toy_decoder: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of its batch of which nothing was seen are decoded again."""
    (jobs, all_ended), real = two_jobs(toy_decoder, 4), toy_decoder.generate

    def fails(prompts: Any, **options: Any) -> Any:
        if len(prompts) == 1:
            return real(prompts, **options)
        for row in (0, 1):
            options["callbacks"][0].on_token(row, 5)
        jobs[0].text = "seen"
        raise FsdError("the guide cannot go on.")

    monkeypatch.setattr(toy_decoder, "generate", fails)
    with closing(Batcher(toy_decoder, max_batch=2, max_queue=4)) as batcher:
        batcher.submit(jobs)
        assert all_ended()
    assert isinstance(jobs[0].reason, FsdError) and jobs[1].reason == "length" and len(jobs[1].ids) == 4
