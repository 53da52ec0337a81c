"""What lossy rules would be worth with a drafter, forecast from one run of exact decoding."""

from fsd_bench.worth.forecasts import Forecast, Row, Shaped, forecast

__all__ = ["Forecast", "Row", "Shaped", "forecast"]
