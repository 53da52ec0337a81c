"""Requests to a server of a toy, and the answers that clients see."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from fastapi.testclient import TestClient

from fsd_infer import FuzzyDecoder, parse_rule
from fsd_infer.serving.app import Limits
from fsd_infer.serving.batcher import Job

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = Limits(max_batch=4, max_queue=400, max_new_tokens=24, max_bytes=4096)


def asked(text: str = "the cat sat on the mat", **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}


def make_job(decoder: FuzzyDecoder, new: int, tell: Callable[[str, Job | None], None], **more: Any) -> Job:
    """An exact greedy answer of ``new`` tokens."""
    options = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    ids = decoder.encode("the cat sat on the mat")
    return Job(ids, parse_rule("exact"), options, new, [], time.monotonic() + 60, tell, **more)


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
