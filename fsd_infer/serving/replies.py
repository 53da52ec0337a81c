"""OpenAI's envelopes around answers."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fsd_core.text.pieces import Piece
from fsd_infer.serving.batcher import AnswerJob, Logprob
from fsd_infer.serving.tools import CallReader, ToolCall

LOWEST = -9999.0  # OpenAI's log-probability of a token that cannot come: JSON has no infinity


class Reply:
    """The answers to one request, whole or in parts.

    Args:
        model: its name.
        is_chat: whether the envelopes are those of a chat completion.
        jobs: one per answer, those of a prompt together.
        count: answers per prompt.
        reader: makes a reader of tool calls per answer; None: answers may call none.
    """

    def __init__(
        self,
        model: str,
        is_chat: bool,
        jobs: Sequence[AnswerJob],
        count: int = 1,
        reader: Callable[[], CallReader] | None = None,
    ) -> None:
        self.model, self.is_chat, self.jobs, self.count = model, is_chat, jobs, count
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._readers = None if reader is None else [reader() for _ in jobs]
        self._begun: set[int] = set()
        self._shown = [0] * len(jobs)  # characters that were sent
        self._sent = [0] * len(jobs)  # log-probabilities that were sent
        self._offsets = [0] * len(jobs)  # where their text ended

    def event(self, index: int, text: str, is_over: bool) -> str:
        """Return an event of a stream: the new text of answer ``index``, or its end."""
        choice: dict[str, Any] = {"text": text}
        self._shown[index] += len(text)
        if self.is_chat:
            count = len(self._readers[index].made) if self._readers else 0
            text, calls = self._read(index, text, is_over)
            delta: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
            delta |= {"content": text} if text else {}
            if calls:
                delta["tool_calls"] = [{"index": count + i, **_called(call)} for i, call in enumerate(calls)]
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
        reader = self._readers[index] if self._readers else None
        if is_over and reader and reader.made and (reason == "stop" or reader.is_forced):
            reason = "tool_calls"
        return {"index": index, "logprobs": self._logprobs(index, is_over), "finish_reason": reason}

    def _envelope(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        object_name = ("chat.completion" + ".chunk" * chunk) if self.is_chat else "text_completion"
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        of_prompts = [self.jobs[first : first + self.count] for first in range(0, len(self.jobs), self.count)]
        prompt, answers = sum(len(jobs[0].prompt) for jobs in of_prompts), sum(len(job.ids) for job in self.jobs)
        # of a prompt's answers one read what the others found in the cache
        cached = {"cached_tokens": sum(min(job.cached for job in jobs) for jobs in of_prompts)}
        counts = {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}
        quality = self.jobs[0].quality
        chosen = {} if quality is None else {"quality": quality, "rule": self.jobs[0].rule.describe()}
        return {**counts, "prompt_tokens_details": cached, **chosen}

    def _logprobs(self, index: int, is_over: bool) -> dict[str, Any] | None:
        """The log-probabilities that have not been sent, of tokens whose text is sent."""
        job = self.jobs[index]
        if job.alternatives is None:
            return None
        end = len(job.ids) if is_over else job.answer.tokens_within(self._shown[index])
        new = job.logprobs[self._sent[index] : end]
        self._sent[index] += len(new)
        if self.is_chat:
            return {"content": [_chat_entry(token) for token in new], "refusal": None}
        offsets = []
        for token in new:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.piece.text)
        return {
            "tokens": [_text(token.piece) for token in new],
            "token_logprobs": [_finite(token.value) for token in new],
            "top_logprobs": [_by_text(token) for token in new],
            "text_offset": offsets,
        }


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}  # Mistral's take 9 characters


def _chat_entry(logprob: Logprob) -> dict[str, Any]:
    return {**_entry(logprob.piece, logprob.value), "top_logprobs": [_entry(*pair) for pair in logprob.best]}


def _entry(piece: Piece, value: float) -> dict[str, Any]:
    return {"token": piece.name, "logprob": _finite(value), "bytes": list(piece.raw)}


def _by_text(logprob: Logprob) -> dict[str, float]:
    """The likeliest tokens and the chosen one, whose key is its text even if other tokens have the same text."""
    chosen = logprob.piece.token
    token_of = {_text(logprob.piece): chosen}
    log_probs: dict[str, float] = {}
    for piece, value in (*logprob.best, (logprob.piece, logprob.value)):
        key = _text(piece)
        if piece.token != chosen and not key:  # a part of a character
            key = "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.raw)
        if token_of.setdefault(key, piece.token) != piece.token:
            key = f"token_id:{piece.token}"
        log_probs[key] = _finite(value)
    return log_probs


def _text(piece: Piece) -> str:
    """What a token adds to the text; the name of a special token, which adds nothing."""
    return piece.text or ("" if piece.raw else piece.name)


def _finite(value: float) -> float:
    return max(value, LOWEST)
