"""Temperature 0, which transformers refuses, and greedy decoding are the same: the one place that translates."""

from __future__ import annotations

from typing import Any


def at_temperature(temperature: float | None) -> dict[str, Any]:
    """Return the arguments of ``generate`` that sample at a temperature; 0 and None are greedy."""
    return {"do_sample": bool(temperature), "temperature": temperature or None}


def sampling_temperature(config: Any) -> float:
    """Return the temperature of a complete GenerationConfig; 0 if it is greedy."""
    if not config.do_sample:
        return 0.0
    return 1.0 if config.temperature is None else config.temperature
