"""Measure decoding methods side by side: ``fsd-bench run``, and the same as :func:`run`.

Methods take turns prompt by prompt, so that whatever else the machine does hits all of them alike; speeds are compared
pair by pair on the same prompt::

    import fsd_bench
    from fsd_bench.report import bench_table

    record = fsd_bench.run(
        "prompts.jsonl",
        ["hf-generate", "plain", "exact", "vllm=server:http://localhost:8000"],
        target="smollm2-135m", max_new_tokens=64, repeat=3, baselines=["vllm"], json_path="record.json",
    )
    print(bench_table(record))
    record["methods"]["exact"]["tokens_per_second"], record["ratios"]["vllm"]["exact"]["tokens_per_second"]["low"]

How methods are written: :mod:`fsd_bench.methods`; what the numbers are: :func:`build_record`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fsd_core.former import warn_renamed

if TYPE_CHECKING:
    from fsd_bench.base import MeasuredAnswer, Method, TimedRun
    from fsd_bench.methods import METHODS, make_methods, parse_methods
    from fsd_bench.record import build_record
    from fsd_bench.runner import run
    from fsd_bench.server import ServerError
    from fsd_bench.settings import RunOptions

# The module of each public name, imported when the name is first used, so that `fsd-bench --help` answers at once.
_MODULES = {
    "base": ("MeasuredAnswer", "Method", "TimedRun"),
    "methods": ("METHODS", "make_methods", "parse_methods"),
    "record": ("build_record",),
    "runner": ("run",),
    "server": ("ServerError",),
    "settings": ("RunOptions",),
}
_HOME = {name: f"fsd_bench.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "METHODS",
    "MeasuredAnswer",
    "Method",
    "RunOptions",
    "ServerError",
    "TimedRun",
    "build_record",
    "make_methods",
    "parse_methods",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "Settings":
        warn_renamed("fsd_bench.Settings", "it is now RunOptions", 3)
        return __getattr__("RunOptions")
    if name not in _HOME:
        raise AttributeError(f"module 'fsd_bench' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
