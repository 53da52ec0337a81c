"""Any server that speaks the OpenAI completions API (vLLM, SGLang, llama.cpp ...) as a method.

It gets the same prompt token ids as the other methods and streams its answer, so that the time until the first token
(prefill) and the rest are timed separately. Wall time is the client's: the cost of the server's protocol is part of it.
"""

from __future__ import annotations

import time
from typing import Any

from fsd_bench.base import Answer, Method, TimedRun
from fsd_bench.openai_client import EXTENSIONS, UNSHAPED, Server, ServerError

__all__ = ["Server", "ServerError", "ServerMethod"]


class ServerMethod(Method):
    """A server's completions at the same temperature and without other shaping, on the same prompt token ids.

    Tokens are the ids the server sends where it does (vLLM: ``return_token_ids``), else its ``usage`` counts them and
    their ids are unknown. Target forwards are unknown either way. Prefill is the time until the first tokens arrive.
    A server that refuses the fields beyond OpenAI's protocol does so at the first answer, which the warm-up gets.

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
        count = len(prompts)
        ids: list[list[int]] = [[] for _ in range(count)]
        texts, reasons = [""] * count, ["length"] * count
        sends_ids, usage, first = True, None, None
        start = time.perf_counter()
        for event in self.server.stream(body, EXTENSIONS):
            usage = event.get("usage") or usage
            for choice in event.get("choices") or []:
                new = choice.get("token_ids")
                if new or choice.get("text"):
                    first = first or time.perf_counter()
                    sends_ids = sends_ids and new is not None
                ids[choice.get("index", 0)] += new or []
                texts[choice.get("index", 0)] += choice.get("text") or ""
                if choice.get("finish_reason"):
                    reasons[choice.get("index", 0)] = "stop" if choice["finish_reason"] == "stop" else "length"
        seconds = time.perf_counter() - start
        if sends_ids and all(ids):
            answers = [Answer(tokens, None, None, finish_reason=why) for tokens, why in zip(ids, reasons, strict=True)]
        elif usage and usage.get("completion_tokens") is not None:
            share, left = divmod(int(usage["completion_tokens"]), count)
            counts = [share + (index < left) for index in range(count)]
            answers = [
                Answer(None, None, None, finish_reason=why, counted=counted, text=text)
                for counted, why, text in zip(counts, reasons, texts, strict=True)
            ]
        else:
            raise ServerError(
                f"server {self.server.url} reports neither token ids nor usage: its tokens cannot be counted."
            )
        return TimedRun(seconds, (first or start + seconds) - start, answers)

    def describe(self) -> dict[str, Any]:
        return {"by": "server", "url": self.server.url, "model": self.model, "owned_by": self.owner}
