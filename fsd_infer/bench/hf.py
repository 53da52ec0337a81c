"""transformers' own ``generate`` as a method: greedy or sampled, with prompt lookup, with an assistant model."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from fsd_infer.bench.base import Answer, Method, TimedRun
from fsd_infer.errors import FsdError
from fsd_infer.targets.token_ids import eos_ids, left_pad, pad_id


class _Rounds(BaseStreamer):
    """Notes when the first new tokens arrived and how many each forward emitted (sizes[0] is the prompt's)."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        if self.sizes and self.first is None:
            self.first = time.perf_counter()
        self.sizes.append(value.numel())

    def end(self) -> None:
        pass


class GenerateMethod(Method):
    """transformers' ``generate`` on an untouched model. Prefill is the time until its first new token.

    Args:
        name: of the method.
        model: the target.
        speculation: arguments that make ``generate`` speculate, e.g. ``{"prompt_lookup_num_tokens": 8}``; then it
            takes one prompt at a time.
        facts: what a record is to say about them.
    """

    def __init__(
        self, name: str, model: Any, speculation: dict[str, Any] | None = None, facts: dict[str, Any] | None = None
    ) -> None:
        self.name, self.model, self.speculation, self.facts = name, model, speculation or {}, facts or {}
        self.eos, self.pad = eos_ids(model.generation_config), pad_id(model.generation_config)

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        if self.speculation and len(prompts) > 1:
            raise FsdError(f"{self.name}: transformers speculates on one prompt at a time: --batch-size 1.")
        ids, mask = left_pad(prompts, self.pad, self.model.device)
        rounds = _Rounds()
        beams = self.speculation.get("num_beams", 1) > 1
        streamer = None if beams else rounds  # beams cannot be streamed: their prefill is not timed apart
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=mask, pad_token_id=self.pad, streamer=streamer, **options, **self.speculation
        ).tolist()
        seconds = time.perf_counter() - start
        first = (rounds.first or start + seconds) - start
        return TimedRun(
            seconds, first, [self._answer(row[ids.shape[1] :], rounds, beams or len(prompts) > 1) for row in output]
        )

    def _answer(self, tokens: list[int], rounds: _Rounds, unseen: bool) -> Answer:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
        tokens = tokens[:end]
        if unseen:
            forwards = verified = len(tokens) - 1
        else:
            forwards, verified = len(rounds.sizes) - 2, len(tokens) - rounds.sizes[1]
        return Answer(tokens, forwards, verified, finish_reason="length" if end is None else "stop")

    def describe(self) -> dict[str, Any]:
        return {"by": "transformers", "model": "separate copy, linear layers not packed", **self.facts}
