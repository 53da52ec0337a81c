"""Callbacks of training, as recipes name them."""

from __future__ import annotations

from fsd_train.callbacks.curves import LossCurve
from fsd_train.callbacks.decoded import DecodedTau
from fsd_train.callbacks.export import ExportHead
from fsd_train.callbacks.progress import Announce, RunProgress, TokenRate
from fsd_train.callbacks.runs import RunDirectory
from fsd_train.callbacks.safety import CheckResume, StopOnNonFinite

__all__ = [
    "Announce",
    "CheckResume",
    "DecodedTau",
    "ExportHead",
    "LossCurve",
    "RunDirectory",
    "RunProgress",
    "StopOnNonFinite",
    "TokenRate",
]
