"""The decoding loop, and what a run reports."""

from fsd_infer.engine.loop import decode
from fsd_infer.engine.request import Outcome, Request

__all__ = ["Outcome", "Request", "decode"]
