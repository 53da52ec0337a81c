"""The decoding loop and its statistics."""

from fsd_infer.engine.loop import decode
from fsd_infer.engine.request import Outcome, Request
from fsd_infer.engine.rounds import Round

__all__ = ["Outcome", "Request", "Round", "decode"]
