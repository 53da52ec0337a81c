"""The public API: :class:`FuzzyDecoder` and its two configurations, the loop for transformers' ``generate``, and
calibrated settings.
"""

from fsd_infer.decoder.config import FuzzyConfig, RuntimeConfig
from fsd_infer.decoder.custom import generate
from fsd_infer.decoder.fuzzy import FuzzyDecoder, GenerateOutput
from fsd_infer.decoder.prompts import Prompt
from fsd_infer.drafters.loading import load_drafter

__all__ = ["FuzzyConfig", "FuzzyDecoder", "GenerateOutput", "Prompt", "RuntimeConfig", "generate", "load_drafter"]
