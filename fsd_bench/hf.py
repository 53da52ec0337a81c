"""Measure transformers' ``generate``: greedy or sampled, with prompt lookup, an assistant model or beams."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from fsd_bench.base import MeasuredAnswer, Method, TimedRun
from fsd_core.errors import FsdError
from fsd_infer.request.options import only_stated
from fsd_infer.targets.token_ids import eos_ids, left_pad, pad_id


class _Rounds(StoppingCriteria):
    """Notes when the first round ended and how long the text was after each one. It never stops decoding.

    A round is a forward of the model, see :meth:`forwarded`: transformers 5.16 also asks about an assistant's drafts.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.first = 0.0
        self._verified = False

    def forwarded(self, *_: Any) -> None:
        """Note a forward of the model; a hook."""
        self._verified = True

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._verified:
            self.first = self.first or time.perf_counter()
            self.lengths.append(input_ids.shape[1])
            self._verified = False
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class GenerateMethod(Method):
    """transformers' ``generate`` on an unchanged model. Prefill is the time until its first new token.

    Args:
        name: name of the method.
        model: the target.
        arguments: further arguments of ``generate``, e.g. ``{"prompt_lookup_num_tokens": 8}`` or ``{"num_beams": 4}``.
        facts: what a record stores about them.
    """

    def __init__(
        self, name: str, model: Any, arguments: dict[str, Any] | None = None, facts: dict[str, Any] | None = None
    ) -> None:
        self.name, self.model, self.arguments, self.facts = name, model, arguments or {}, facts or {}
        self.beams = self.arguments.get("num_beams", 1) > 1
        self.eos, self.pad = eos_ids(model.generation_config), pad_id(model.generation_config)
        self.config = copy.deepcopy(model.generation_config)
        only_stated(self.config, ())

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        if self.arguments and not self.beams and len(prompts) > 1:
            raise FsdError(f"{self.name}: transformers speculates on one prompt at a time. Use --batch-size 1.")
        ids, mask = left_pad(prompts, self.pad, self.model.device)
        rounds = _Rounds()
        hook = self.model.register_forward_hook(rounds.forwarded)
        torch.manual_seed(seed)
        config_before, self.model.generation_config = self.model.generation_config, self.config
        start = time.perf_counter()
        try:
            output = self.model.generate(
                ids, attention_mask=mask, pad_token_id=self.pad, stopping_criteria=StoppingCriteriaList([rounds]),
                **options, **self.arguments,
            ).tolist()  # fmt: skip
        finally:
            hook.remove()
            self.model.generation_config = config_before
        seconds = time.perf_counter() - start
        steps, emitted = len(rounds.lengths) - 1, rounds.lengths[0] - ids.shape[1]  # after and in the first round
        answers = []
        for row in output:
            tokens = row[ids.shape[1] :]
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
            tokens = tokens[:end]
            if self.beams:
                forwards = verified = steps
            elif len(prompts) > 1:
                forwards = verified = len(tokens) - 1
            else:
                forwards, verified = steps, len(tokens) - emitted
            answers.append(
                MeasuredAnswer(tokens, forwards, verified, finish_reason="length" if end is None else "stop")
            )
        return TimedRun(seconds, rounds.first - start, answers)

    def describe(self) -> dict[str, Any]:
        return {"by": "transformers", "model": "separate copy, linear layers not packed", **self.facts}
