"""The decoding loop and its statistics."""

from fsd_infer.engine.callbacks import Callback
from fsd_infer.engine.loop import decode
from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.request import Outcome, Request, Round

__all__ = ["Callback", "Outcome", "Request", "Round", "RoundReport", "decode"]
