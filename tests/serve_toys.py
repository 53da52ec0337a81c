"""Requests to a server of a toy, and the answers that clients see."""

from __future__ import annotations

import json
from typing import Any

from fastapi.testclient import TestClient

from fsd_infer.serving.app import Limits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = Limits(max_batch=4, max_queue=400, max_new_tokens=24, max_bytes=4096)


def asked(text: str = "the cat sat on the mat", **more: Any) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}


def streamed(client: TestClient, body: dict[str, Any]) -> tuple[str, str]:
    """Text and finish reason of a streamed chat completion."""
    text, reason = "", ""
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert json.loads(lines[0])["choices"][0]["delta"]["role"] == "assistant"
    for line in lines:
        choice = json.loads(line)["choices"][0]
        text += choice["delta"].get("content", "")
        reason = choice["finish_reason"] or reason
    return text, reason
