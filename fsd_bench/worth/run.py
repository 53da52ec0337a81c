"""``fsd-infer worth``: load models and prompts by name, and forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_bench.environment import environment
from fsd_bench.models import ModelOptions
from fsd_bench.prompts import encode_rows, spread_rows
from fsd_bench.worth.forecasts import Forecast, forecast
from fsd_infer.decoder import FuzzyDecoder
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
    """

    prompts: str | Path
    rules: Sequence[str] = ()
    temperature: float = 0.0
    limit: int | None = 16
    max_new_tokens: int = 96
    raw: bool = False
    seed: int = 0

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
    found = forecast(
        decoder, options.encoded(decoder), options.rules, temperature=options.temperature,
        max_new_tokens=options.max_new_tokens, seed=options.seed, progress=progress,
    )  # fmt: skip
    described = {**asdict(options), "prompts": Path(options.prompts).name}
    return found, {"options": described, "forecast": found.to_dict(), "environment": environment()}
