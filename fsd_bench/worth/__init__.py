"""Forecast what lossy rules are worth with a drafter, from one run of exact decoding."""

from fsd_bench.worth.forecasts import forecast
from fsd_bench.worth.result import Forecast, ForecastRow, RuleOnShape
from fsd_core.former import former_names

__all__ = ["Forecast", "ForecastRow", "RuleOnShape", "forecast"]


__getattr__ = former_names(__name__, Shaped="RuleOnShape")
