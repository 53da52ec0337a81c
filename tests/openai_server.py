"""A small server with the OpenAI completions API, in this process (:func:`serving`) or as a program.

As a program its tokens are made up: ``python -m tests.openai_server --port N [--fail]``; other options are ignored, as
are unknown ones of any server that it stands in for.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does.

    Attributes:
        answer: prompt ids and a limit -> new ids.
        tells_ids: whether it sends token ids (else a request with ``return_token_ids`` is refused: an unknown field).
        answers_left: it breaks off in the middle of an answer once it has given so many; None: never.
        burst: tokens per event.
        text: of every event.
        metrics: what it answers at /metrics; None: nothing is there.
    """

    answer: Callable[[list[int], int], list[int]]
    tells_ids: bool = True
    answers_left: int | None = None
    burst: int = 1
    text: str = "x"
    metrics: Callable[[], str] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.behaviour.metrics is not None:
            return self._whole(200, self.behaviour.metrics())
        found = self.path in ("/v1/models", "/health")
        return self._whole(200 if found else 404, {"object": "list", "data": [{"id": "toy", "owned_by": "tests"}]})

    def do_POST(self) -> None:
        behaviour = self.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions" or body["model"] != "toy":
            return self._whole(404, {"error": {"message": "no such model"}})
        if not behaviour.tells_ids and "return_token_ids" in body:
            return self._whole(400, {"error": {"message": "unknown field return_token_ids"}})
        behaviour.requests.append(body)
        if not body.get("stream"):
            return self._whole(200, {"choices": [self._choice(body["prompt"], body["max_tokens"])]})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        count = 0
        for index, prompt in enumerate(prompts):
            made = behaviour.answer(prompt, body["max_tokens"])
            count += len(made)
            for start in range(0, len(made), behaviour.burst):
                choice: dict[str, Any] = {"index": index, "text": behaviour.text, "finish_reason": None}
                if behaviour.tells_ids:
                    choice["token_ids"] = made[start : start + behaviour.burst]
                if start + behaviour.burst >= len(made):
                    choice["finish_reason"] = "length" if len(made) == body["max_tokens"] else "stop"
                self._event(json.dumps({"choices": [choice]}))
                if behaviour.answers_left == 0:
                    self.close_connection = True
                    return None
        if behaviour.answers_left is not None:
            behaviour.answers_left -= 1
        self._event(json.dumps({"choices": [], "usage": {"completion_tokens": count}}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _choice(self, prompt: list[int], limit: int) -> dict[str, Any]:
        made = self.behaviour.answer(prompt, limit)
        choice: dict[str, Any] = {"index": 0, "text": self.behaviour.text * len(made)}
        choice["finish_reason"] = "length" if len(made) == limit else "stop"
        return {**choice, "token_ids": made} if self.behaviour.tells_ids else choice

    def _event(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _whole(self, status: int, body: dict[str, Any] | str) -> None:
        payload = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _bind(handler: type[BaseHTTPRequestHandler], port: int) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    return server


def _make(behaviour: Behaviour, port: int) -> ThreadingHTTPServer:
    return _bind(type("Handler", (_Handler,), {"behaviour": behaviour}), port)


@contextmanager
def _running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The server's address while it runs."""
    with _running(_make(behaviour, 0)) as url:
        yield url


Reply = Callable[[dict[str, Any], int], tuple[int, Any] | None]


@contextmanager
def replying(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every POST by ``reply``, and then closes the connection without saying so.

    Args:
        reply: the request's body and its number from 1 -> status and answer (bytes, or what becomes JSON); None: it
            closes the connection at once.

    Yields:
        Its address, and the requests so far: path, Authorization header (``key``) and body.
    """
    asked: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.close_connection = True
            with lock:
                asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
                number = len(asked)
            made = reply(body, number)
            if made is None:
                return
            status, answer = made
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with _running(_bind(Handler, 0)) as url:
        yield url, asked


def made_up(prompt: list[int], limit: int) -> list[int]:
    """Tokens that depend on the prompt."""
    return [(sum(prompt) + 7 * i) % 200 + 5 for i in range(limit)]


def main() -> int:
    """Serve until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fail", action="store_true")
    args, _ = parser.parse_known_args()
    if args.fail:
        print("loading ...\nRuntimeError: no such instruction set", file=sys.stderr)
        return 3
    _make(Behaviour(made_up), args.port).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
