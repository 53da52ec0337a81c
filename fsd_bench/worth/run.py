"""``fsd-infer worth``: load models and prompts by name, forecast, and check the forecast by decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fsd_bench.environment import environment
from fsd_bench.jobs import UNSHAPED, decoding
from fsd_bench.models import ModelOptions
from fsd_bench.prompts import encode_rows, spread_rows
from fsd_bench.worth.forecasts import Forecast, Measured, Row, deep_drafter, forecast
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters.growth import TreeDrafter
from fsd_infer.errors import FsdError
from fsd_infer.rules import parse_rule


@dataclass(kw_only=True)
class WorthOptions(ModelOptions):
    """The options of a forecast, besides those of its models. ``tree`` is decoded with, and cut.

    Attributes:
        prompts: file of prompts, see :func:`fsd_infer.chat.encoding.read_prompts`.
        rules: rules besides the usual ones.
        temperature: 0 is greedy.
        limit: most prompts, evenly spread; None for all.
        max_new_tokens: new tokens per answer.
        raw: continue prompts without the chat template.
        seed: seed of draws.
        measure: number of the fastest rules to decode with too, besides exact.
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
        """Raise FsdError for options that can be refused before anything is loaded."""
        super().check()
        if isinstance(self.tree, str):
            raise FsdError(f"worth decodes with a named tree and cuts it: give a shape for tree {self.tree}.")
        for rule in self.rules:
            parse_rule(rule)

    def encoded(self, decoder: FuzzyDecoder) -> list[list[int]]:
        """Return the prompts' token ids. Raises DataError for a malformed row, or a file without prompts."""
        target, rows = decoder.target, spread_rows([self.prompts], self.limit)
        return encode_rows(rows, target.name, decoder.tokenizer, target.max_positions, self.raw)


def worth(options: WorthOptions, *, progress: bool = False) -> tuple[Forecast, dict[str, Any]]:
    """Return the forecast and its record. Raises as :func:`.forecast`, and whatever loading raises."""
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
    """Decode with exact and the ``count`` fastest rules, each on its best shape, and add that to the forecast."""
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
