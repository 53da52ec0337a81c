"""The options of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_bench.layouts import layout_of
from fsd_bench.methods import parse_methods
from fsd_bench.models import ModelOptions
from fsd_bench.record import choose_baselines
from fsd_bench.score import AUTO, check_score
from fsd_core.errors import FsdError
from fsd_core.registry import check_listed


@dataclass
class RunOptions(ModelOptions):
    """The options of a run, besides those of its models.

    Attributes:
        prompts: .jsonl, .jsonl.gz or .json file; rows with `turns` (the first is asked), `prompt`, `question`,
            `instruction` or `messages`.
        methods: see :mod:`fsd_bench.methods`.
        limit: number of prompts; None for all.
        every: take every N-th row of the file (files are often sorted by category).
        max_new_tokens: new tokens per answer.
        temperature: 0 is greedy.
        repeat: answers of each method per prompt.
        seed: seed of draws and of the bootstrap (None: 0). If it is given, each request has a seed, too. Then answers
            repeat, because trees follow the text alone. Otherwise they may follow the clock, as a user's do.
        batch_size: prompts that are decoded together. Batches never mix categories.
        threads: torch threads; None leaves them unchanged.
        warmup: run every method once, uncounted, before anything is timed.
        log_likelihood: measure the target's mean log-likelihood per token, by untimed forwards over the answers.
        baselines: names of the methods that the others are compared with. Default: hf-generate and plain, if measured.
        score: kind of reference that answers are scored against, see :mod:`fsd_bench.score`.
        isolate: None: methods share this process and take turns prompt by prompt. A number of blocks of prompts: each
            method answers a block in its own process while no other one runs, and methods take turns by block.
        raw: continue prompts without the chat template.
        strict: stop at the first row that cannot be used, instead of skipping a few.
        layout: layout of a public data set's file, see :mod:`fsd_bench.layouts`.
        fields: our name -> the file's, for own files.
        turns: user turns that are asked of a row with `turns`, each after the method's own answers to those before;
            None: all of a public file's, else the first.
        run_code: run answers that are programs, see :mod:`fsd_bench.code`.
    """

    prompts: str | Path
    methods: Sequence[str]
    limit: int | None = None
    every: int = 1
    max_new_tokens: int = 128
    temperature: float = 0.0
    repeat: int = 1
    seed: int | None = None
    batch_size: int = 1
    threads: int | None = None
    warmup: bool = True
    log_likelihood: bool = False
    baselines: Sequence[str] = ()
    score: str = AUTO
    isolate: int | None = None
    raw: bool = False
    strict: bool = False
    layout: str | None = None
    fields: dict[str, str] | None = None
    run_code: bool = False
    turns: int | None = None

    def check(self) -> None:
        """Raise FsdError for options that can be refused before anything is loaded."""
        super().check()
        check_listed("methods", self.methods)
        check_listed("baselines", self.baselines)
        choose_baselines([spec.name for spec in parse_methods(self.methods)], self.baselines)
        check_score(self.score)
        layout_of(self.layout, self.fields)
        if self.turns is not None and self.turns > 1 and (self.raw or self.isolate is not None):
            raise FsdError("later turns continue answers in the chat template: leave out --raw and --isolate.")
        if self.seed is not None and any(spec.text.endswith(":keep") for spec in parse_methods(self.methods)):
            raise FsdError('"memory:keep" learns nothing from requests with a seed: leave out the one or the other.')

    @property
    def most_turns(self) -> int | None:
        """User turns that are asked of a conversation; None for all."""
        return self.turns or (1 if self.layout is None or self.raw or self.isolate is not None else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        lists = {"methods": list(self.methods), "baselines": list(self.baselines)}
        return {**asdict(self), "prompts": Path(self.prompts).name, **lists}
