"""Beam search and beam sampling with drafts: the same beams from fewer target forwards."""

from fsd_infer.engine.beams.engine import decode_beams
from fsd_infer.engine.beams.forest import Begun
from fsd_infer.engine.beams.options import BeamOptions
from fsd_infer.engine.beams.proposers import Proposer, proposer_of

__all__ = ["BeamOptions", "Begun", "Proposer", "decode_beams", "proposer_of"]
