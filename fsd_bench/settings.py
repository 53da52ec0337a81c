"""What a benchmark measures, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fsd_bench.methods import parse_methods
from fsd_bench.models import ModelOptions
from fsd_bench.record import choose_baselines
from fsd_bench.score import AUTO, check_score
from fsd_infer.errors import FsdError


@dataclass
class Settings(ModelOptions):
    """The options of a run, beside those of its models.

    Attributes:
        prompts: .jsonl, .jsonl.gz or .json file; rows with `turns` (the first is asked), `prompt`, `question`,
            `instruction` or `messages`.
        methods: see :mod:`fsd_bench.methods`.
        limit: only the first so many prompts; None for all.
        every: take each so-many-th row of the file (files are often sorted by category).
        max_new_tokens: of each answer.
        temperature: 0 is greedy.
        repeat: how often each method answers each prompt.
        seed: of draws and of the bootstrap.
        batch_size: prompts that are decoded together. Batches never mix categories.
        threads: of torch; None leaves them as they are.
        warmup: run every method once, uncounted, before anything is timed.
        log_likelihood: also report the target's mean log-likelihood per token, from untimed forwards over the answers.
        baselines: names of the methods that the others are compared with; by default hf-generate and plain where they
            are measured.
        score: which references of the rows the answers are held against, see :mod:`fsd_bench.score`.
        isolate: None: methods share this process and take turns prompt by prompt. A number: the prompts are divided
            into so many blocks; each method answers a block in a process of its own, with no other one alive, and
            methods take turns block by block.
        raw: continue prompts without the chat template.
    """

    prompts: str | Path
    methods: Sequence[str]
    limit: int | None = None
    every: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    repeat: int = 1
    seed: int = 0
    batch_size: int = 1
    threads: int | None = None
    warmup: bool = True
    log_likelihood: bool = False
    baselines: Sequence[str] = ()
    score: str = AUTO
    isolate: int | None = None
    raw: bool = False

    def check(self) -> None:
        """Raises FsdError for what can be refused before anything is loaded."""
        super().check()
        choose_baselines([spec.name for spec in parse_methods(self.methods)], self.baselines)
        check_score(self.score)
        if not 0 <= self.temperature < math.inf:
            raise FsdError(f"temperature must be 0 or above and finite, got {self.temperature}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        lists = {"methods": list(self.methods), "baselines": list(self.baselines)}
        return {**asdict(self), "prompts": Path(self.prompts).name, **lists}


def set_threads(settings: Settings) -> None:
    """Torch's number of threads, if one is wanted."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
