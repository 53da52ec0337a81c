"""Forecast what lossy rules are worth with a drafter, from one run of exact decoding."""

from fsd_bench.worth.forecasts import Forecast, ForecastRow, Shaped, forecast

__all__ = ["Forecast", "ForecastRow", "Shaped", "forecast"]
