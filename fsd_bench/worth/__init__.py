"""Forecast what lossy rules are worth with a drafter, from one run of exact decoding."""

from typing import Any

from fsd_bench.worth.forecasts import forecast
from fsd_bench.worth.result import Forecast, ForecastRow, RuleOnShape
from fsd_core.former import say

__all__ = ["Forecast", "ForecastRow", "RuleOnShape", "forecast"]


def __getattr__(name: str) -> Any:
    if name != "Shaped":
        raise AttributeError(f"module 'fsd_bench.worth' has no attribute {name!r}")
    say("fsd_bench.worth.Shaped", "it is now RuleOnShape", 3)
    return RuleOnShape
