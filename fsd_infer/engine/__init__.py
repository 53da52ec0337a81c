"""The decoding loop, and what a run reports."""

from fsd_infer.engine.loop import Outcome, Request, decode
from fsd_infer.engine.rounds import Round

__all__ = ["Outcome", "Request", "Round", "decode"]
