"""Measure a server with the OpenAI completions API (vLLM, SGLang, llama.cpp ...).

It gets the same prompt token ids as the other methods. Its answer is streamed, so that the prefill is timed apart from
the rest. Wall time is the client's and includes the cost of the protocol.
"""

from __future__ import annotations

import time
from typing import Any

from fsd_bench.base import MeasuredAnswer, Method, TimedRun
from fsd_core.openai_client import EXTENSIONS, UNSHAPED, Server, ServerError
from fsd_core.registry import is_whole

__all__ = ["Server", "ServerError", "ServerMethod"]


class ServerMethod(Method):
    """A server's completions at the same temperature, without other changes of the distribution.

    Tokens are the ids that the server sends (vLLM: ``return_token_ids``). Without ids its ``usage`` counts them. Target
    forwards are unknown. Prefill is the time until the first tokens arrive. A server refuses extensions of OpenAI's
    protocol at the first answer, which is the warm-up's.

    Args:
        name: name of the method.
        server: the server.
        model: name of the model; None: the first that the server names.

    Raises:
        ServerError: the server cannot be reached, or does not serve the model.
    """

    def __init__(self, name: str, server: Server, model: str | None = None) -> None:
        self.name, self.server = name, server
        served = server.models()
        chosen = next((row for row in served if model in (None, row["id"])), None)
        if chosen is None:
            known = ", ".join(row["id"] for row in served)
            raise ServerError(f"server {server.url} does not serve {model!r}. It serves: {known}.")
        self.model, self.owner = chosen["id"], chosen.get("owned_by")

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        body = {
            "model": self.model,
            "prompt": prompts[0] if len(prompts) == 1 else prompts,
            "max_tokens": options["max_new_tokens"],
            "temperature": (options.get("temperature") or 1.0) if options.get("do_sample") else 0.0,
            "seed": seed,
            "stream_options": {"include_usage": True},
            **UNSHAPED,
        }
        ids: list[list[int]] = [[] for _ in prompts]
        texts, reasons = [""] * len(prompts), ["length"] * len(prompts)
        sends_ids, first = True, None
        token_count: Any = None
        start = time.perf_counter()
        for event in self.server.stream(body, EXTENSIONS):
            try:
                usage = event.get("usage") or {}
                token_count = usage.get("completion_tokens", token_count)
                for choice in event.get("choices") or []:
                    new, text, index = choice.get("token_ids"), choice.get("text") or "", choice.get("index", 0)
                    if not is_whole(index, 0) or not all(is_whole(token, 0) for token in new or ()):
                        raise ValueError(f"index {index!r}, token ids {new!r}")
                    if new or text:
                        first = first or time.perf_counter()
                        sends_ids = sends_ids and new is not None
                    ids[index] += new or []
                    texts[index] += text
                    if choice.get("finish_reason"):
                        reasons[index] = choice["finish_reason"]
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                message = f"server {self.server.url} sent no event of the OpenAI API: {error!r:.200}."
                raise ServerError(message) from error
        seconds = time.perf_counter() - start
        if "abort" in reasons:  # as vLLM and ours say it
            raise ServerError(f"server {self.server.url} aborted an answer: is it stopping?")
        reasons = ["stop" if reason == "stop" else "length" for reason in reasons]
        if sends_ids and all(ids):
            answers = [
                MeasuredAnswer(tokens, None, None, finish_reason=reason)
                for tokens, reason in zip(ids, reasons, strict=True)
            ]
        elif is_whole(token_count, 0):
            each, remainder = divmod(token_count, len(prompts))
            counts = [each + (index < remainder) for index in range(len(prompts))]
            answers = [
                MeasuredAnswer(None, None, None, finish_reason=reason, counted=token_count, text=text)
                for token_count, reason, text in zip(counts, reasons, texts, strict=True)
            ]
        else:
            raise ServerError(
                f"server {self.server.url} reports neither token ids nor usage, so its tokens cannot be counted."
            )
        return TimedRun(seconds, (first or start + seconds) - start, answers)

    def describe(self) -> dict[str, Any]:
        return {"by": "server", "url": self.server.url, "model": self.model, "owned_by": self.owner}
