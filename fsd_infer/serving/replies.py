"""OpenAI's envelopes around answers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fsd_infer.serving.batcher import Job, Logprob


class Reply:
    """One request's answers, whole or in parts.

    Args:
        model: its name.
        is_chat: of a chat completion.
        jobs: an answer each.
    """

    def __init__(self, model: str, is_chat: bool, jobs: Sequence[Job]) -> None:
        self.model, self.is_chat, self.jobs = model, is_chat, jobs
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._begun: set[int] = set()
        self._told = [0] * len(jobs)  # log-probabilities that were sent, and where the text was then
        self._offsets = [0] * len(jobs)

    def event(self, index: int, text: str, reason: str | None) -> str:
        """A part of a stream."""
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        part: dict[str, Any] = {"text": text}
        if self.is_chat:
            part = {"delta": {**role, **({"content": text} if text else {})}}
        choice = {**part, "index": index, "logprobs": self._logprobs(index), "finish_reason": reason}
        return f"data: {json.dumps(self._envelope([choice], chunk=True))}\n\n"

    def usage_event(self) -> str:
        """The part of a stream that follows the last one, for clients that ask for it."""
        return f"data: {json.dumps({**self._envelope([], chunk=True), 'usage': self._usage()})}\n\n"

    def whole(self) -> dict[str, Any]:
        """Answers that are not streamed."""
        choices = []
        for index, job in enumerate(self.jobs):
            part: dict[str, Any] = {"text": job.text}
            if self.is_chat:
                part = {"message": {"role": "assistant", "content": job.text}}
            logprobs = self._logprobs(index)
            choices.append({**part, "index": index, "logprobs": logprobs, "finish_reason": str(job.reason)})
        return {**self._envelope(choices, chunk=False), "usage": self._usage()}

    def _envelope(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt, answers = len(self.jobs[0].prompt), sum(len(job.ids) for job in self.jobs)
        return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Those that have not been sent."""
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


def _chat_entry(each: Logprob) -> dict[str, Any]:
    return {**_entry(each.text, each.value), "top_logprobs": [_entry(*pair) for pair in each.best]}


def _entry(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
