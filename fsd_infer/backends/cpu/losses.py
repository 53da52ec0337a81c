"""What a user loses on a machine without the kernels, and how to get it: said once per process."""

from __future__ import annotations

from fsd_infer.backends.cpu.kernels import found
from fsd_infer.targets.weights import say


def say_what_is_lost() -> None:
    """Say why a model runs without our kernels, unless FSD_KERNELS asks for that or a failed build was reported."""
    now = found()
    if now.kernels is None and not now.forced and not now.failed:
        say(
            f"decoding runs through torch, and quantised weights are expanded, both slower: {now.why}. Our CPU kernels "
            "need AVX2, as x86-64 processors have since about 2015. See fsd-infer env."
        )
