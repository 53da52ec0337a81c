"""The client of OpenAI-compatible servers: its requests, its retries and its errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fsd_core.openai_client import Server, ServerError
from tests.openai_server import replying

BODY = {"model": "toy", "prompt": [1, 2], "max_tokens": 3}
DONE = {"choices": []}


def good(body: dict[str, Any], number: int) -> tuple[int, Any]:
    return 200, DONE


@pytest.mark.parametrize(
    ("given", "asked"), [("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/a/v2", "/a/v2")]
)
def test_v1_is_added_to_an_address_without_a_path(given: str, asked: str) -> None:
    with replying(good) as (url, seen):
        assert Server(url + given).complete(BODY) == DONE
    assert [request["path"] for request in seen] == [asked + "/completions"]


@pytest.mark.parametrize("passing", [(503, b"busy"), (429, b"slow down"), (200, b"<html>"), None])
def test_what_may_pass_is_asked_again_with_its_extensions(passing: tuple[int, bytes] | None) -> None:
    with replying(lambda body, number: good(body, number) if number > 2 else passing) as (url, seen):
        server = Server(url, attempts=3, pause=0.001)
        assert [server.complete(BODY, {"top_k": -1}) for _ in range(2)] == [DONE] * 2
    assert [body["top_k"] for body in seen] == [-1] * 4


REFUSED = [
    (500, 2, "status 500: out of memory .* after 2 tries"),
    *((status, 1, f"status {status}: out of memory") for status in (307, 400, 404)),
]


@pytest.mark.parametrize(("status", "tries", "said"), REFUSED)
def test_the_last_try_tells_address_and_reason(status: int, tries: int, said: str) -> None:
    with replying(lambda body, number: (status, b"out of\n memory")) as (url, seen):
        with pytest.raises(ServerError, match=f"server {url} refused .*{said}") as raised:
            Server(url, attempts=2, pause=0.001).complete(BODY)
    assert raised.value.status == status and len(seen) == tries
    with pytest.raises(ServerError, match=f"server {url} cannot be reached .Connection refused.: is it running.$"):
        Server(url).complete(BODY)


def strict(status: int) -> Any:
    """A server that accepts only OpenAI's fields, and streams."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        if "top_k" in body or body["max_tokens"] > 9:
            return status, b"unknown field or too long"
        return 200, b'data: {"choices": [1]}\n\ndata: [DONE]\n\n' if body.get("stream") else DONE

    return reply


@pytest.mark.parametrize(("status", "streamed"), [(400, True), (422, False)])
def test_refused_extensions_are_left_out(status: int, streamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    def ask(server: Server, **more: Any) -> Any:
        body = {**BODY, **more}
        return list(server.stream(body, {"top_k": -1})) if streamed else server.complete(body, {"top_k": -1})

    with replying(strict(status)) as (url, seen), caplog.at_level(logging.WARNING):
        server = Server(url)
        for _ in range(3):  # refused with and without: the extension is not to blame
            with pytest.raises(ServerError, match=f"status {status}: .*too long"):
                ask(server, max_tokens=99)
        assert ["top_k" in body for body in seen] == [True, False] * 3 and not caplog.records
        assert [ask(server) for _ in range(3)] == [[{"choices": [1]}] if streamed else DONE] * 3
        assert ["top_k" in body for body in seen[6:]] == [True, False, False, False]
        ask(Server(url))  # another server is asked for itself
        assert "top_k" in seen[-2]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and url in messages[0] and "top_k" in messages[0]


STREAMS = [
    (b'data: {"choices": []}\n\n', "broke off an answer: is it still running"),
    (b'data: {"choi\n\n', "broke off an answer"),
    (b'data: {"error": {"message": "out of memory"}}\n\n', "failed: .*out of memory"),
    (b'data: {"choices": [1]}\r\n\r\ndata: [DONE]\r\n\r\n', ""),
]


@pytest.mark.parametrize(("sent", "message"), STREAMS)
def test_streams_without_chunks_and_their_ends(sent: bytes, message: str) -> None:
    with replying(lambda body, number: (200, sent)) as (url, _):
        if message:
            with pytest.raises(ServerError, match=message):
                list(Server(url).stream(BODY))
        else:
            assert list(Server(url).stream(BODY)) == [{"choices": [1]}]
