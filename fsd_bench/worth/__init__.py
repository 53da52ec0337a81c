"""Forecast what lossy rules are worth with a drafter, from one run of exact decoding."""

from fsd_bench.worth.forecasts import forecast
from fsd_bench.worth.result import Forecast, ForecastRow, Shaped

__all__ = ["Forecast", "ForecastRow", "Shaped", "forecast"]
