"""The decoding loop, and what a run reports."""

from fsd_infer.engine.loop import Outcome, Request, decode

__all__ = ["Outcome", "Request", "decode"]
