"""Measure this package's engine under any rule with any drafter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from fsd_bench.base import AnswerTimeline, MeasuredAnswer, Method, TimedRun
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import Drafter
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.rules import Rule
from fsd_infer.trees.policy import TreeStats


class EngineMethod(Method):
    """This package's engine. Its prefill includes the drafter's, and time outside the loop is phase ``rest``.

    Args:
        name: name of the method.
        decoder: target and engine.
        rule: acceptance rule.
        drafter: drafter.
        beams: number of beams.
        beam_options: options of beam search.
        traced: give answers a trace.

    Attributes:
        seeded: whether requests have a seed, so that answers repeat. Otherwise trees may follow the clock.
    """

    def __init__(
        self,
        name: str,
        decoder: FuzzyDecoder,
        rule: Rule,
        drafter: Drafter,
        beams: int = 1,
        beam_options: BeamOptions | None = None,
        traced: bool = False,
    ) -> None:
        self.name, self.decoder, self.rule, self.drafter = name, decoder, rule, drafter
        self.beams, self.beam_options, self.traced = beams, beam_options or BeamOptions(), traced
        self.seeded = traced
        self.trees: TreeStats | None = None
        self.drafted: dict[str, Any] | None = None  # the tree may depend on the rule and the batch

    def answer(self, prompts: list[list[int]], options: dict[str, Any], seed: int) -> TimedRun:
        self.drafter.forget()  # a repeated prompt must not be answered from memory
        if self.beams > 1:
            options = {**options, "num_beams": self.beams, "beams": self.beam_options}
        rounds: list[list[int]] = [[] for _ in prompts]  # tokens that each one gives to the answer
        if self.beams == 1:
            options = {**options, "callbacks": [Streaming(lambda row, tokens: rounds[row].append(len(tokens)))]}
        if self.seeded:
            options = {**options, "seed": seed}
        torch.manual_seed(seed)
        start = time.perf_counter()
        generation = self.decoder.generate(prompts, rule=self.rule, drafter=self.drafter, **options)
        seconds = time.perf_counter() - start
        stats = generation.stats
        self.drafted = self.drafted or stats.drafter
        if stats.trees is not None:
            self.trees = self.trees or TreeStats()
            self.trees.add(stats.trees)
        answers = [
            MeasuredAnswer(
                tokens=tokens,
                target_forwards=row.target_forwards,
                verified_tokens=(row.new_tokens if record.steps is None else record.steps) - 1,
                gate_open_fraction=row.gate_open_fraction,
                gate_accepted_fraction=row.gate_accepted_fraction,
                divergence_spent=row.divergence_spent,
                finish_reason=row.finish_reason,
                regrets=row.drafts.gaps(),
                accepted=_accepted_at_least(row_rounds) if self.beams == 1 else None,
            )
            for tokens, row, record, row_rounds in zip(
                generation.sequences, stats.rows, generation.records, rounds, strict=True
            )
        ]
        if self.traced:
            for answer, record, row_rounds in zip(answers, generation.records, rounds, strict=True):
                spent: list[list[float]] = [[index, round(nats, 5)] for index, nats in enumerate(record.spent) if nats]
                sources = "".join(str(int(source)) for source in record.sources)
                answer.trace = AnswerTimeline(row_rounds, sources, spent)
        phases = {**stats.phases, "rest": max(seconds - stats.seconds, 0.0)}
        return TimedRun(seconds, stats.prefill_seconds, answers, phases)

    def describe(self) -> dict[str, Any]:
        return {
            "by": "fsd_infer",
            "rule": self.rule.describe(),
            "beams": self.beams,
            "beam_options": self.beam_options.given(),
            "drafter": self.drafted or self.drafter.describe(),
            **({} if self.trees is None else {"trees": self.trees.to_dict()}),
        }


def _accepted_at_least(rounds: Sequence[int]) -> list[int]:
    """Return :attr:`.MeasuredAnswer.accepted` from the tokens of each round, the prefill's first."""
    drafts = [tokens - 1 for tokens in rounds[1:]]
    return [sum(count >= accepted for count in drafts) for accepted in range(1, max(drafts, default=0) + 1)]
