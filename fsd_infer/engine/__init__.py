"""The decoding loop and its statistics."""

from fsd_infer.engine.loop import decode
from fsd_infer.engine.request import Outcome, Request, Round

__all__ = ["Outcome", "Request", "Round", "decode"]
