"""Choose candidates for a calibration that names none: the rules that a forecast recommends for this drafter."""

from __future__ import annotations

from dataclasses import replace

from fsd_bench.prompts import Encoder, encode_rows
from fsd_bench.sweep.settings import EXACT, SweepOptions
from fsd_bench.worth.forecasts import forecast
from fsd_bench.worth.run import verdict
from fsd_core.errors import FsdError

AUTO = "auto"
PROMPTS, TOKENS = 16, 96  # of the forecast
MAX_CANDIDATES = 4  # candidates, because each takes a share of the confidence


def forecast_rules(options: SweepOptions, progress: bool = False) -> list[str]:
    """Return up to :data:`MAX_CANDIDATES` rules of the forecast's frontier with their fastest shapes, cheapest first.

    The forecast sees some of the prompts, but neither references nor scores.

    Raises:
        FsdError: no rule is forecast to be faster than exact, invalid options, or whatever :func:`.forecast` raises.
    """
    replace(options, rules=[EXACT, "tilted"]).check()  # other errors are raised before anything is loaded
    decoder = options.load(options.drafter)
    rows = options.read()
    rows = rows[:: max(len(rows) // PROMPTS, 1)][:PROMPTS]
    prompts = encode_rows(rows, Encoder.of(decoder, options.raw))
    result = forecast(
        decoder, prompts, temperature=float(options.temperatures[0]),
        max_new_tokens=min(options.max_new_tokens, TOKENS), seed=options.seed, progress=progress,
    )  # fmt: skip
    rules = result.frontier()
    if not rules:
        raise FsdError(f"nothing to calibrate: {verdict(result)} Name rules to calibrate some anyway.")
    last = min(len(rules), MAX_CANDIDATES) - 1
    spread = [rules[index * (len(rules) - 1) // max(last, 1)] for index in range(last + 1)]
    return [f"{row.rule}@{row.best.shape.text}" for row in spread]
