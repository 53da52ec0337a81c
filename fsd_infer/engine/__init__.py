"""The decoding loop and its statistics."""

from fsd_infer.engine.callback import Callback
from fsd_infer.engine.loop import decode
from fsd_infer.engine.report import RoundReport
from fsd_infer.engine.request import Request, Round
from fsd_infer.engine.stats import Outcome

__all__ = ["Callback", "Outcome", "Request", "Round", "RoundReport", "decode"]
