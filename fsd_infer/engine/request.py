"""The input and output of the decoding loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from fsd_infer.engine.rounds import Round
from fsd_infer.engine.stats import GenerationStats, RowRecord


@dataclass
class Request:
    """One batch to decode, as ``generate`` would prepare it.

    Attributes:
        prompts: token ids per row, without padding, none empty.
        max_new_tokens: most tokens per answer.
        greedy: temperature 0.
        processors: prepared logits processors, temperature included.
        criteria: prepared stopping criteria other than EOS and length. They receive the text alone; ``scores`` is None.
        eos_token_ids: tokens that end an answer.
        generator: of the draws; None: torch's global generator.
        on_round: called with (row, round) before ``on_tokens``.
        on_tokens: called with (row, tokens) when tokens are final. If the callback returns a true value, that row
            stops.
        padded_prompts: the prompts for processors and criteria, left-padded; None: without padding.
        measure_log_likelihood: record the target's log-probability of each emitted token.
        cache_keys: per prompt, its key in the prefix cache; None: one key for all.
        max_cache_bytes: most bytes of the KV caches; None: the free memory.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    greedy: bool = True
    processors: LogitsProcessorList | None = None
    criteria: StoppingCriteriaList | None = None
    eos_token_ids: frozenset[int] = frozenset()
    generator: torch.Generator | None = None
    on_round: Callable[[int, Round], None] | None = None
    on_tokens: Callable[[int, list[int]], object] | None = None
    padded_prompts: list[list[int]] | None = None
    measure_log_likelihood: bool = False
    cache_keys: Sequence[str] | None = None
    max_cache_bytes: int | None = None


@dataclass
class Outcome:
    """Answers (new tokens only), per-token records, statistics and, with beams, each answer's score."""

    sequences: list[list[int]]
    records: list[RowRecord]
    stats: GenerationStats
    scores: list[float] | None = None
