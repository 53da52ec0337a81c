"""Measure decoding methods side by side: ``fsd-infer bench``, and the same as :func:`run`.

Methods take turns prompt by prompt, so that whatever else the machine does hits all of them alike; speeds are compared
pair by pair on the same prompt.
"""

from fsd_infer.bench.methods import METHODS, Answer, Method, TimedRun, make_methods
from fsd_infer.bench.record import build_record
from fsd_infer.bench.runner import Settings, run

__all__ = ["METHODS", "Answer", "Method", "Settings", "TimedRun", "build_record", "make_methods", "run"]
