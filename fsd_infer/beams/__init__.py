"""Beam search and beam sampling with drafts: the same beams from fewer forwards of the target."""

from fsd_infer.beams.engine import BeamOutcome, BeamRequest, search_beams
from fsd_infer.beams.forest import Begun
from fsd_infer.beams.options import BeamOptions
from fsd_infer.beams.prepared import decode_beams
from fsd_infer.beams.proposers import Proposer, proposer_of

__all__ = [
    "BeamOptions",
    "BeamOutcome",
    "BeamRequest",
    "Begun",
    "Proposer",
    "decode_beams",
    "proposer_of",
    "search_beams",
]
