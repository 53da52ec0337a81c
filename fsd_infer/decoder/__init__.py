"""The public API: :class:`FuzzyDecoder`, the loop for transformers' ``generate``, and calibrated settings."""

from fsd_infer.decoder.fuzzy import FuzzyDecoder, Generation, Prompt
from fsd_infer.decoder.requests import generate
from fsd_infer.drafters.loading import load_drafter

__all__ = ["FuzzyDecoder", "Generation", "Prompt", "generate", "load_drafter"]
