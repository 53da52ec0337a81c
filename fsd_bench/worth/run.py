"""``fsd-infer worth``: load models and prompts by name, forecast, and check the forecast by decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fsd_bench.environment import environment
from fsd_bench.jobs import UNSHAPED, decoding
from fsd_bench.models import ModelOptions
from fsd_bench.runner import encode_row
from fsd_bench.worth.forecasts import Forecast, Measured, Row, deep_drafter, forecast
from fsd_infer.chat.encoding import read_prompts
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters.growth import TreeDrafter
from fsd_infer.errors import DataError, FsdError
from fsd_infer.rules import parse_rule


@dataclass(kw_only=True)
class WorthOptions(ModelOptions):
    """The options of a forecast, beside those of its models; ``tree`` is what is decoded with, and cut.

    Attributes:
        prompts: a file of prompts, see :func:`fsd_infer.chat.encoding.read_prompts`.
        rules: beside the usual ones.
        temperature: 0 is greedy.
        limit: at most so many prompts, evenly spread; None for all.
        max_new_tokens: of each answer.
        raw: continue the prompts as they are, without the chat template.
        seed: of draws.
        measure: decode with so many of the fastest rules too, beside exact.
    """

    prompts: str | Path
    rules: Sequence[str] = ()
    temperature: float = 0.0
    limit: int | None = 16
    max_new_tokens: int = 96
    raw: bool = False
    seed: int = 0
    measure: int = 0

    def check(self) -> None:
        """Raises FsdError for what can be refused before anything is loaded."""
        super().check()
        if not 0 <= self.temperature < math.inf:
            raise FsdError(f"temperature must be 0 or above and finite, got {self.temperature}.")
        if isinstance(self.tree, str):
            raise FsdError(f"worth decodes with a named tree and cuts it: give a shape for tree {self.tree}.")
        for rule in self.rules:
            parse_rule(rule)

    def encoded(self, decoder: FuzzyDecoder) -> list[list[int]]:
        """Token ids of the prompts. Raises DataError for a malformed row, or a file without prompts."""
        rows = list(read_prompts(self.prompts))
        if not rows:
            raise DataError(f"{self.prompts}: no prompts. Give a file with at least one row.")
        count = min(self.limit or len(rows), len(rows))
        rows = [rows[index * len(rows) // count] for index in range(count)]
        target = decoder.target
        return [encode_row(row, target.name, decoder.tokenizer, target.max_positions, self.raw) for row in rows]


def worth(options: WorthOptions, *, progress: bool = False) -> tuple[Forecast, dict[str, Any]]:
    """The forecast, and a record of it. Errors as of :func:`.forecast`, and whatever loading raises."""
    options.check()
    decoder = options.load(options.drafter)
    prompts = options.encoded(decoder)
    asked: dict[str, Any] = dict(
        temperature=options.temperature, max_new_tokens=options.max_new_tokens, seed=options.seed, progress=progress
    )
    found = forecast(decoder, prompts, options.rules, **asked)
    if options.measure:
        found = measure(decoder, deep_drafter(decoder.drafter), prompts, found, options.measure, **asked)
    described = {**asdict(options), "prompts": Path(options.prompts).name}
    return found, {"options": described, "forecast": found.to_dict(), "environment": environment()}


def measure(
    decoder: FuzzyDecoder,
    drafter: TreeDrafter,
    prompts: Sequence[Any],
    found: Forecast,
    count: int,
    *,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    progress: bool = False,
) -> Forecast:
    """The same forecast with what decoding says of exact and of the ``count`` fastest rules, each on its best shape."""
    fastest = sorted(found.rows[1:], key=lambda row: -row.speed)[:count]
    names = {row.rule for row in [found.exact, *fastest]}
    bar = tqdm(total=len(names), desc="check", unit="rule", disable=not progress)

    def checked(row: Row) -> Row:
        if row.rule not in names:
            return row
        shaped = drafter.reshaped(row.best.shape)
        emitted = forwards = 0
        seconds = nats = 0.0
        for number, prompt in enumerate(prompts):
            options = decoding(temperature, max_new_tokens, **UNSHAPED)
            stats = decoder.generate([prompt], row.rule, drafter=shaped, seed=seed + number, **options).stats
            emitted += stats.new_tokens - 1
            forwards += stats.target_forwards
            seconds += stats.seconds - stats.prefill_seconds
            nats += stats.divergence_spent
        bar.update()
        return replace(row, measured=Measured(emitted / forwards, nats / max(emitted, 1), emitted / seconds))

    return replace(found, rows=[checked(row) for row in found.rows])
