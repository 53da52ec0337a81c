"""Requests to a server of a toy, and the answers that clients see."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from fsd_infer import FuzzyDecoder
from fsd_infer.rules import parse_rule
from fsd_infer.serving.app import Limits
from fsd_infer.serving.batcher import AnswerJob
from fsd_infer.serving.listen import server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = Limits(max_batch=4, max_queue=400, max_new_tokens=24, max_bytes=4096)


def asked(text: str = "the cat sat on the mat", **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}


async def ask(app: FastAPI, path: str, parts: list[bytes], leaves: bool = False, **scope: Any) -> tuple[int, bytes]:
    """Status and body of the answer to a request, by the server's own interface.

    Args:
        parts: of the body; those that the server asks for are taken out.
        leaves: whether the client leaves after the last part.
        scope: other values of ASGI's.
    """
    said, status = b"", 0

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        if not leaves:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal said, status
        status, said = message.get("status", status), said + message.get("body", b"")

    usual = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "root_path": "", "scheme": "http", "query_string": b"", "client": ("127.0.0.1", 1), "server": ("x", 8000),
        "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0"},
    }  # fmt: skip
    await app({**usual, **scope}, receive, send)
    return status, said


def make_job(decoder: FuzzyDecoder, new: int, tell: Callable[[str, AnswerJob | None], None], **more: Any) -> AnswerJob:
    """An exact greedy answer of ``new`` tokens."""
    options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    ids = decoder.encode("the cat sat on the mat")
    return AnswerJob(ids, parse_rule("exact"), options, new, [], time.monotonic() + 60, tell, **more)


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices that a streamed answer sends, in order."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


def streamed(client: TestClient, body: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]]]:
    """Text, finish reason and tool calls of a streamed chat completion."""
    choices = events(client, CHAT, body)
    assert choices[0]["delta"]["role"] == "assistant"
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    return text, choices[-1]["finish_reason"], calls


@contextmanager
def listening(app: FastAPI) -> Iterator[int]:
    """Serve on the loopback, and stop as SIGTERM does. Yields the port."""
    made, started, ports = server(app, "127.0.0.1", 0), threading.Event(), list[int]()
    made.config.timeout_keep_alive = 0.3  # type: ignore[assignment]  # seconds until an idle connection ends
    begin = made.startup

    async def startup(sockets: Any = None) -> None:
        await begin(sockets)
        ports.append(made.servers[0].sockets[0].getsockname()[1])
        started.set()

    made.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield ports[0]
    finally:
        made.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def connections(port: int, sent: list[bytes]) -> Iterator[list[socket.socket]]:
    """Connections that have sent these bytes."""
    opened = [socket.create_connection(("127.0.0.1", port), 60) for _ in sent]
    try:
        for one, data in zip(opened, sent, strict=True):
            one.sendall(data)
        yield opened
    finally:
        for one in opened:
            one.close()


def rest(one: socket.socket) -> bytes:
    """What a connection still brings until its other end closes it."""
    parts = []
    with suppress(ConnectionResetError):
        while part := one.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
