"""Any server that speaks the OpenAI completions API (vLLM, SGLang, llama.cpp ...) as a method.

It gets the same prompt token ids as the other methods and streams its answer, so that the time until the first token
(prefill) and the rest are told apart. Wall time is the client's: what the server's own protocol costs is part of it.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from fsd_infer.bench.base import Answer, Method, TimedRun
from fsd_infer.errors import FsdError

TIMEOUT = 600.0  # seconds without a sign of life


class ServerError(FsdError):
    """A server that cannot be reached or refuses a request. The message names it and what it said.

    Attributes:
        status: the HTTP status it refused with, or None.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """One server over one connection that is kept open.

    Args:
        url: e.g. ``http://localhost:8000``; ``/v1`` is added to an address without a path.

    Raises:
        FsdError: not an http or https address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host:
            raise FsdError(f"server {url!r}: give its address, e.g. server:http://localhost:8000#model.")
        self.url = url
        self.base = parts.path.rstrip("/") or "/v1"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.connection = kind(host, port, timeout=TIMEOUT)
        self.headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            self.headers["Authorization"] = f"Bearer {key}"

    def open(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """The response with status 200. Raises ServerError otherwise."""
        payload = None if body is None else json.dumps(body)
        try:
            try:
                response = self._send(method, path, payload)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.connection.close()  # an idle connection that the server has closed: once more on a new one
                response = self._send(method, path, payload)
            if response.status == 200:
                return response
            said = " ".join(response.read(2000).decode("utf-8", "replace").split())
            self.connection.close()
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            raise ServerError(f"server {self.url} cannot be reached ({_reason(error)}): is it running?") from error
        raise ServerError(
            f"server {self.url} refused {self.base}{path} with status {response.status}: {said}", response.status
        )

    def _send(self, method: str, path: str, payload: str | None) -> http.client.HTTPResponse:
        self.connection.request(method, self.base + path, payload, self.headers)
        return self.connection.getresponse()

    def models(self) -> list[dict[str, Any]]:
        """What the server says it serves. Raises ServerError."""
        with self.open("GET", "/models") as response:
            text = response.read()
        try:
            found = [row for row in json.loads(text)["data"] if isinstance(row["id"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"server {self.url}: {self.base}/models is not what the OpenAI API answers.") from error
        if not found:
            raise ServerError(f"server {self.url} serves no model.")
        return found

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion as they arrive. Raises ServerError."""
        done = False
        try:
            with self.open("POST", "/completions", {**body, "stream": True}) as response:
                for line in response:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        done = True
                    elif line.startswith(b"data:"):
                        event = json.loads(data)
                        if "error" in event:
                            raise ServerError(f"server {self.url} failed: {json.dumps(event['error'])}")
                        yield event
            if not done:
                raise ServerError(f"server {self.url} broke off an answer: is it still running?")
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise ServerError(f"server {self.url} broke off an answer ({_reason(error)}).") from error
        finally:
            if not done:  # what is left of the answer must not be taken for the next one
                self.connection.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class ServerMethod(Method):
    """A server's completions at the same temperature, on the same prompt token ids.

    Tokens are the ids the server sends where it does (vLLM: ``return_token_ids``), else its ``usage`` counts them and
    their ids are unknown. Target forwards are unknown either way. Prefill is the time until the first tokens arrive.

    Args:
        name: of the method.
        server: where.
        model: which; None for the first that the server names.

    Raises:
        ServerError: not reachable, or it does not serve the model.
    """

    def __init__(self, name: str, server: Server, model: str | None = None) -> None:
        self.name, self.server = name, server
        served = server.models()
        chosen = next((row for row in served if model in (None, row["id"])), None)
        if chosen is None:
            known = ", ".join(row["id"] for row in served)
            raise ServerError(f"server {server.url} does not serve {model!r}. It serves: {known}.")
        self.model, self.owner = chosen["id"], chosen.get("owned_by")
        self.asks_for_ids = True

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        body = {
            "model": self.model,
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            "max_tokens": options["max_new_tokens"],
            "temperature": (options.get("temperature") or 1.0) if options.get("do_sample") else 0.0,
            "top_p": 1.0,
            "seed": seed,
            "stream_options": {"include_usage": True},
        }
        try:
            return self._timed(body, len(prompts))
        except ServerError as error:
            # servers that refuse unknown fields: once more without the one that is vLLM's own
            if not self.asks_for_ids or error.status not in (400, 422):
                raise
            self.asks_for_ids = False
            return self._timed(body, len(prompts))

    def _timed(self, body: dict[str, Any], count: int) -> TimedRun:
        if self.asks_for_ids:
            body = {**body, "return_token_ids": True}
        ids: list[list[int]] = [[] for _ in range(count)]
        reasons = ["length"] * count
        told_ids, usage, first = True, None, None
        start = time.perf_counter()
        for event in self.server.stream(body):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                new = choice.get("token_ids")
                if new or choice.get("text"):
                    first = first or time.perf_counter()
                    told_ids = told_ids and new is not None
                ids[choice.get("index", 0)] += new or []
                if choice.get("finish_reason"):
                    reasons[choice.get("index", 0)] = "stop" if choice["finish_reason"] == "stop" else "length"
        seconds = time.perf_counter() - start
        if told_ids and all(ids):
            answers = [Answer(tokens, None, None, finish_reason=why) for tokens, why in zip(ids, reasons, strict=True)]
        elif usage and usage.get("completion_tokens") is not None:
            share, left = divmod(int(usage["completion_tokens"]), count)
            counts = [share + (index < left) for index in range(count)]
            answers = [
                Answer(None, None, None, finish_reason=why, counted=made)
                for made, why in zip(counts, reasons, strict=True)
            ]
        else:
            raise ServerError(f"server {self.server.url} told neither token ids nor usage, so its tokens are unknown.")
        return TimedRun(seconds, (first or start + seconds) - start, answers)

    def describe(self) -> dict[str, Any]:
        return {"by": "server", "url": self.server.url, "model": self.model, "owned_by": self.owner}
