"""What a user loses on a machine or with a file, and how to get it: said once per process."""

from __future__ import annotations

import logging
from functools import cache

from fsd_infer.backends.cpu.kernels import found

logger = logging.getLogger(__name__)

READS = (
    "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q4_K, Q5_K, Q6_K and IQ2_XXS"  # the types of GGUF tensors that kernels read
)


@cache
def say(message: str) -> None:
    """Log a warning, the first time."""
    logger.warning(message)


def say_what_is_lost() -> None:
    """Say why a model runs without our kernels, unless FSD_KERNELS asks for that or a failed build was reported."""
    now = found()
    if now.kernels is None and not now.forced and not now.failed:
        say(
            f"decoding runs through torch, and quantised weights are expanded, both slower: {now.why}. Our CPU kernels "
            "need AVX512-BF16, as AMD's Zen 4 and Intel's Sapphire Rapids and later ones have. See fsd-infer env."
        )
