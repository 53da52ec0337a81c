"""Models in fp64 and every kind of drafter for the tests of beams."""

from __future__ import annotations

from functools import cache
from typing import Any

from fsd_infer import Drafter, Target
from fsd_infer.drafters import GraftedDrafter, LMDrafter, LookupDrafter, NoDrafter, RecycleDrafter
from tests.families import VOCAB, noisy_model, tiny_head, tiny_model

NO_FP64 = {"qwen3_moe", "mixtral", "gpt_oss"}  # torch has no grouped product in fp64


@cache
def doubled(family: str) -> Any:
    """A random model in fp64: no two ways to compute its logits put nearly equal candidates in another order."""
    model = tiny_model(family)
    return model if family in NO_FP64 else model.double()


def noisy_target(family: str) -> Target:
    model = noisy_model(family)
    return Target(model if family in NO_FP64 else model.double())


def drafters_for(target: Target, family: str = "llama") -> dict[str, Drafter]:
    head = tiny_head(target, draft_vocab_size=64)
    return {
        "none": NoDrafter(VOCAB),
        "noisy": LMDrafter(noisy_target(family), target),
        "head": head,
        "lookup": LookupDrafter(VOCAB),
        "recycle": RecycleDrafter(VOCAB),
        "graft": GraftedDrafter(head, LookupDrafter(VOCAB)),
    }
