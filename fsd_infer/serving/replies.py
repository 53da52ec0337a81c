"""OpenAI's envelopes around answers."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fsd_infer.chat.tools import CallReader, ToolCall
from fsd_infer.serving.batcher import Job, Logprob


class Reply:
    """The answers to one request, whole or in parts.

    Args:
        model: its name.
        is_chat: whether the envelopes are those of a chat completion.
        jobs: one per answer.
        reader: makes a reader of tool calls per answer; None: answers may call none.
    """

    def __init__(
        self, model: str, is_chat: bool, jobs: Sequence[Job], reader: Callable[[], CallReader] | None = None
    ) -> None:
        self.model, self.is_chat, self.jobs = model, is_chat, jobs
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._readers = None if reader is None else [reader() for _ in jobs]
        self._begun: set[int] = set()
        self._told = [0] * len(jobs)  # log-probabilities that were sent
        self._offsets = [0] * len(jobs)  # where the text was then

    def event(self, index: int, text: str, is_over: bool) -> str:
        """Return a part of a stream: what answer ``index`` grew by, or its end."""
        choice: dict[str, Any] = {"text": text}
        if self.is_chat:
            made = len(self._readers[index].made) if self._readers else 0
            text, calls = self._read(index, text, is_over)
            delta: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
            delta |= {"content": text} if text else {}
            if calls:
                delta["tool_calls"] = [{"index": made + i, **_called(call)} for i, call in enumerate(calls)]
            choice = {"delta": delta}
        self._begun.add(index)
        return f"data: {json.dumps(self._envelope([choice | self._facts(index, is_over)], chunk=True))}\n\n"

    def usage_event(self) -> str:
        """Return the part of a stream that follows the last one, for clients that ask for it."""
        return f"data: {json.dumps({**self._envelope([], chunk=True), 'usage': self._usage()})}\n\n"

    def whole(self) -> dict[str, Any]:
        """Return answers that are not streamed."""
        choices = []
        for index, job in enumerate(self.jobs):
            choice: dict[str, Any] = {"text": job.text}
            if self.is_chat:
                text, calls = self._read(index, job.text, is_over=True)
                message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
                message |= {"tool_calls": [_called(call) for call in calls]} if calls else {}
                choice = {"message": message}
            choices.append(choice | self._facts(index, is_over=True))
        return {**self._envelope(choices, chunk=False), "usage": self._usage()}

    def _read(self, index: int, text: str, is_over: bool) -> tuple[str, list[ToolCall]]:
        return (text, []) if self._readers is None else self._readers[index].feed(text, is_over)

    def _facts(self, index: int, is_over: bool) -> dict[str, Any]:
        """The fields of a choice besides its text."""
        reason = str(self.jobs[index].reason) if is_over else None
        if reason == "stop" and self._readers and self._readers[index].made:
            reason = "tool_calls"
        return {"index": index, "logprobs": self._logprobs(index), "finish_reason": reason}

    def _envelope(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        prompt, answers = len(self.jobs[0].prompt), sum(len(job.ids) for job in self.jobs)
        cached = {"cached_tokens": min(job.cached for job in self.jobs)}  # some answer's prompt read the others
        counts = {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
        return {**counts, "prompt_tokens_details": cached}

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """The log-probabilities that have not been sent."""
        job = self.jobs[index]
        if job.alternatives is None:
            return None
        new = job.logprobs[self._told[index] : len(job.ids)]
        self._told[index] += len(new)
        if self.is_chat:
            return {"content": [_chat_entry(each) for each in new], "refusal": None}
        offsets = []
        for each in new:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(each.text)
        return {
            "tokens": [each.text for each in new],
            "token_logprobs": [each.value for each in new],
            "top_logprobs": [dict(each.best) for each in new] if job.alternatives else None,
            "text_offset": offsets,
        }


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}  # Mistral's take 9 characters


def _chat_entry(each: Logprob) -> dict[str, Any]:
    return {**_entry(each.text, each.value), "top_logprobs": [_entry(*pair) for pair in each.best]}


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
