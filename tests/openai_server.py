"""A small server with the OpenAI completions API, in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any], int], tuple[int, Any] | None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send(self, status: int, body: Any) -> None:
        """Send a whole answer: bytes, text, or a value that becomes JSON."""
        text = body if isinstance(body, bytes | str) else json.dumps(body)
        data = text if isinstance(text, bytes) else text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on the loopback. Yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Behaviour:
    """The behaviour of a server of the model "toy".

    Attributes:
        answer: prompt ids and a limit -> new ids.
        tells_ids: whether it sends token ids; else it refuses requests with ``return_token_ids`` as an unknown field.
        burst: tokens per event.
        text: of every token.
        metrics: makes the answer at /metrics; None: 404.
    """

    answer: Callable[[list[int], int], list[int]]
    tells_ids: bool = True
    burst: int = 1
    text: str = "x"
    metrics: Callable[[], str] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)

    def choice(self, index: int, text: str, ids: list[int], reason: str | None) -> dict[str, Any]:
        """One choice of an answer."""
        choice = {"index": index, "text": text, "finish_reason": reason}
        return {**choice, "token_ids": ids} if self.tells_ids else choice

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request without streaming."""
        ids, reason = self.answered(body["prompt"], body["max_tokens"])
        return {"choices": [self.choice(0, self.text * len(ids), ids, reason)]}

    def answered(self, prompt: list[int], limit: int) -> tuple[list[int], str]:
        ids = self.answer(prompt, limit)
        return ids, "length" if len(ids) == limit else "stop"

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The answers to a request's prompts, piece by piece, and then the number of tokens."""
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        count = 0
        for index, prompt in enumerate(prompts):
            ids, reason = self.answered(prompt, body["max_tokens"])
            count += len(ids)
            for start in range(0, len(ids), self.burst):
                piece, last = ids[start : start + self.burst], start + self.burst >= len(ids)
                yield {"choices": [self.choice(index, self.text, piece, reason if last else None)]}
        yield {"choices": [], "usage": {"completion_tokens": count}}


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Run a server. Yields its address."""

    def shown(path: str) -> tuple[int, Any]:
        if path == "/metrics" and behaviour.metrics is not None:
            return 200, behaviour.metrics()
        found = path in ("/v1/models", "/health")
        return 200 if found else 404, {"object": "list", "data": [{"id": "toy", "owned_by": "tests"}]}

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if body["path"] != "/v1/completions" or body["model"] != "toy":
            return 404, {"error": {"message": "no such model"}}
        if not behaviour.tells_ids and "return_token_ids" in body:
            return 400, {"error": {"message": "unknown field return_token_ids"}}
        behaviour.requests.append(body)
        if not body.get("stream"):
            return 200, behaviour.whole(body)
        events = map(json.dumps, behaviour.events(body))
        return 200, "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))

    with replying(reply, shown) as (url, _):
        yield url


@contextmanager
def replying(
    reply: Reply, shown: Callable[[str], tuple[int, Any]] | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a server that answers every POST by ``reply`` and closes the connection without notice.

    Args:
        reply: a request and its number from 1 -> status and answer, bytes, text or a value that becomes JSON. None
            closes the connection at once.
        shown: a path -> status and answer of a GET.

    Yields:
        The address, and the requests so far: path, Authorization header (``key``) and body.
    """
    asked: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(_Handler):
        def do_GET(self) -> None:
            self.send(*(shown(self.path) if shown else (404, {})))

        def do_POST(self) -> None:
            request = {"path": self.path, "key": self.headers["Authorization"], **self.body()}
            self.close_connection = True
            with lock:
                asked.append(request)
                number = len(asked)
            made = reply(request, number)
            if made is not None:
                self.send(*made)

    with running(Handler) as url:
        yield url, asked


def made_up(prompt: list[int], limit: int) -> list[int]:
    """Return tokens that depend on the prompt."""
    return [(sum(prompt) + 7 * i) % 200 + 5 for i in range(limit)]
