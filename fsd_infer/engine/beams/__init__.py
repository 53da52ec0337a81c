"""Beam search and beam sampling with drafts: the same beams from fewer target forwards."""

from fsd_infer.engine.beams.engine import decode_beams
from fsd_infer.engine.beams.options import BeamOptions

__all__ = ["BeamOptions", "decode_beams"]
