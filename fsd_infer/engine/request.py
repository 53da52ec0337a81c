"""What is asked of the decoding loop, and what it gives."""

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
        max_new_tokens: upper bound of each answer's length.
        greedy: temperature 0.
        processors: prepared logits processors, temperature included.
        criteria: prepared stopping criteria other than end-of-sequence and length. They are called with the text alone:
            their ``scores`` are None.
        eos_token_ids: tokens that end an answer.
        generator: randomness; None for torch's global generator.
        on_round: called with (row, round) before the round's tokens, if anyone looks on.
        on_tokens: called with (row, tokens) as soon as tokens of an answer are final; what is true of its result ends
            the answer there.
        padded_prompts: the prompts as processors and criteria are to see them, left-padded; None: without padding.
        measure_log_likelihood: record the target's log-probability of each emitted token.
        cache_keys: per prompt, whose it is in a prefix cache; None: everyone's.
        max_cache_bytes: most that the key-value caches may take; None: what is free.
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
    """Answers (new tokens only), per-token records and statistics; of beams each answer's score too, else None."""

    sequences: list[list[int]]
    records: list[RowRecord]
    stats: GenerationStats
    scores: list[float] | None = None
