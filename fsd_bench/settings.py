"""What a benchmark measures, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fsd_bench.methods import parse_methods
from fsd_bench.models import Models
from fsd_bench.record import choose_baselines
from fsd_bench.score import AUTO, check_score
from fsd_infer.drafters import TreeShape
from fsd_infer.errors import FsdError
from fsd_infer.targets.loading import parse_device, parse_dtype


@dataclass
class Settings:
    """The options of a run.

    Attributes:
        prompts: .jsonl, .jsonl.gz or .json file; rows with `turns` (the first is asked), `prompt`, `question`,
            `instruction` or `messages`.
        methods: see :mod:`fsd_bench.methods`.
        target, drafter, dtype, device, tree, cuda_graphs, quantize: as in ``FuzzyDecoder.from_pretrained``, dtype by
            name.
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
    """

    prompts: str | Path
    methods: Sequence[str]
    target: str = "smollm2-135m"
    drafter: str | None = None
    dtype: str = "bf16"
    device: str | None = None
    tree: TreeShape | str | None = None
    cuda_graphs: bool = False
    quantize: bool = True
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

    def check(self) -> None:
        """Raises FsdError for what can be refused before anything is loaded."""
        choose_baselines([spec.name for spec in parse_methods(self.methods)], self.baselines)
        parse_dtype(self.dtype)
        parse_device(self.device)
        check_score(self.score)
        for name in ("limit", "every", "max_new_tokens", "repeat", "batch_size", "threads", "isolate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FsdError(f"{name} must be at least 1, got {value}.")
        if not 0 <= self.temperature < math.inf:
            raise FsdError(f"temperature must be 0 or above and finite, got {self.temperature}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        lists = {"methods": list(self.methods), "baselines": list(self.baselines)}
        return {**asdict(self), "prompts": Path(self.prompts).name, **lists}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """From :meth:`to_dict`; what an older record does not have takes its default."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        tree = known.get("tree")
        return cls(**{**known, "tree": TreeShape(**tree) if isinstance(tree, dict) else tree})


def models_of(settings: Settings) -> Models:
    """What its methods run on, with nothing loaded yet."""
    return Models(
        settings.target, settings.drafter, settings.dtype, settings.device, settings.tree, settings.cuda_graphs,
        settings.quantize,
    )  # fmt: skip


def set_threads(settings: Settings) -> None:
    """Torch's number of threads, if one is wanted."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
