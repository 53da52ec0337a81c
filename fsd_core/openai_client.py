"""Client of servers with the OpenAI completions API (vLLM, SGLang, llama.cpp ...): completions, retries, streams."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from fsd_core.errors import FsdError, causes

API_KEY = "OPENAI_API_KEY"  # the environment variable of the bearer token, if servers need one
TIMEOUT = 600.0  # seconds without data before a request fails
LONGEST_PAUSE = 30.0  # seconds
# Servers fill in missing fields from the model's generation config (Qwen2.5's penalises repetition, also at temperature
# 0). These fields leave the target's distribution unchanged:
UNSHAPED: dict[str, Any] = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# The same in extensions of OpenAI's protocol, and vLLM's field for the answer's ids.
EXTENSIONS: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")

log = logging.getLogger(__name__)


class ServerError(FsdError):
    """A server cannot be reached or refuses a request. The message names it and quotes its reply.

    Attributes:
        status: HTTP status of the refusal, or None.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether a retry may succeed: after no answer, too many requests, or a server error."""
        return self.status is None or self.status == 429 or self.status >= 500


class Server:
    """A server. Connections stay open, and threads may share it.

    A completion has fields of OpenAI's protocol and extensions of it. If a server refuses the extensions (status 400 or
    422) and answers without them, it gets none from then on, and a warning is logged.

    Args:
        url: e.g. ``http://localhost:8000``; ``/v1`` is added to an address without a path.
        attempts: tries of :meth:`complete`. A stream is tried once.
        pause: seconds before the second try, doubled for each further one up to 30, less a random part.
        connections: number of connections that are kept for parallel requests.

    Raises:
        FsdError: not an http or https address.
    """

    def __init__(
        self,
        url: str,
        *,
        attempts: int = 1,
        pause: float = 1.0,
        connections: int = 1,
    ) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port  # reading the port checks that it is a number
        except ValueError:
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise FsdError(f"server {url!r}: give its address, e.g. http://localhost:8000.")
        self.url = url
        self.attempts, self.pause = attempts, pause
        self._takes_extensions = True
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._base = parts.path.rstrip("/") or "/v1"
        self._session = requests.Session()
        self._session.trust_env = host not in _THIS_MACHINE  # no proxy for this machine
        self._session.headers["Accept-Encoding"] = "identity"  # unpacking would delay streamed tokens
        self._session.auth = _bearer(os.environ.get(API_KEY))
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=connections))

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server serves, at least one. Raises ServerError."""
        reply = self._open("GET", "/models")
        try:
            models = [row for row in reply.json()["data"] if isinstance(row["id"], str)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ServerError(f"server {self.url}: {self._base}/models is not what the OpenAI API answers.") from error
        if not models:
            raise ServerError(f"server {self.url} serves no model.")
        return models

    def complete(self, body: Mapping[str, Any], extensions: Mapping[str, Any] | None = None) -> Any:
        """Return the reply to one completions request as JSON. Raises ServerError after the last try.

        Args:
            body: fields of OpenAI's protocol.
            extensions: further fields, for servers that accept them.
        """
        attempt = 1
        while True:
            try:
                return self._completion(body, extensions)
            except ServerError as error:
                if not error.may_pass or self.attempts <= 1:
                    raise
                if attempt >= self.attempts:
                    raise ServerError(f"{error} No answer after {attempt} tries.", error.status) from error
            time.sleep(min(self.pause * 2 ** (attempt - 1), LONGEST_PAUSE) * random.uniform(0.5, 1.0))
            attempt += 1

    def _completion(self, body: Mapping[str, Any], extensions: Mapping[str, Any] | None) -> Any:
        reply = self._ask(body, extensions)
        try:
            return reply.json()
        except (ValueError, RecursionError) as error:  # not only JSON's: numbers of thousands of digits
            raise ServerError(f"server {self.url}: {self._base}/completions answered no JSON.") from error

    def stream(self, body: Mapping[str, Any], extensions: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion. Takes the arguments of :meth:`complete`. Raises ServerError."""
        done = False
        try:
            with self._ask({**body, "stream": True}, extensions, stream=True) as reply:
                # chunks are read as they arrive; without chunks requests would wait for the whole size
                for line in reply.iter_lines(chunk_size=1 << 20 if reply.raw.chunked else 1):
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        done = True
                    elif line.startswith(b"data:"):
                        event = json.loads(data)
                        if not isinstance(event, dict):
                            raise ServerError(f"server {self.url} sent {data[:60]!r} as an event, not an object.")
                        if "error" in event:
                            raise ServerError(f"server {self.url} failed: {json.dumps(event['error'])}")
                        yield event
        except (requests.RequestException, json.JSONDecodeError, RecursionError) as error:
            raise ServerError(f"server {self.url} broke off an answer ({_reason(error)}).") from error
        if not done:
            raise ServerError(f"server {self.url} broke off an answer: is it still running?")

    def _ask(
        self, body: Mapping[str, Any], extensions: Mapping[str, Any] | None, stream: bool = False
    ) -> requests.Response:
        """Request a completion, with the extensions if the server accepts them. Raises ServerError."""
        if extensions and self._takes_extensions:
            try:
                return self._open("POST", "/completions", {**body, **extensions}, stream)
            except ServerError as error:
                if error.status not in (400, 422):
                    raise
            reply = self._open("POST", "/completions", body, stream)  # raises if the extensions were not the cause
            if self._takes_extensions:  # warn once, also with several threads
                self._takes_extensions = False
                log.warning(
                    "server %s refuses %s, extensions of OpenAI's protocol. Further requests go without them, so its "
                    "defaults apply.", self.url, ", ".join(extensions),
                )  # fmt: skip
            return reply
        return self._open("POST", "/completions", body, stream)

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, stream: bool = False
    ) -> requests.Response:
        """Return the response if its status is 200. Raises ServerError otherwise."""
        send = partial(
            self._session.request, method, self._origin + self._base + path, json=body, stream=stream,
            timeout=TIMEOUT, allow_redirects=False,  # a redirected POST would arrive as a GET
        )  # fmt: skip
        try:
            try:
                reply = send()
            except requests.ConnectionError as error:
                if not isinstance(_root(error), (ConnectionResetError, BrokenPipeError)):
                    raise
                reply = send()  # the server had closed an idle connection
            if reply.status_code == 200:
                return reply
            detail = " ".join(reply.content.decode("utf-8", "replace").split())[:2000]
        except requests.RequestException as error:
            raise ServerError(f"server {self.url} cannot be reached ({_reason(error)}): is it running?") from error
        raise ServerError(
            f"server {self.url} refused {self._base}{path} with status {reply.status_code}: {detail}", reply.status_code
        )


def _bearer(key: str | None) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    """Return what sends the key as a header. Without a key it still keeps requests from reading ~/.netrc."""

    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if key:
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    return sign


def _root(error: BaseException) -> BaseException:
    """Return the first error below the libraries. An FsdError in the chain belongs to the caller."""
    chain = list(causes(error, implicit=True))
    end = next((index for index, cause in enumerate(chain) if index and isinstance(cause, FsdError)), len(chain))
    return chain[end - 1]


def _reason(error: Exception) -> str:
    root = _root(error)
    return getattr(root, "strerror", None) or str(root) or type(root).__name__
