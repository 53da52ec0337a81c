"""Models in fp64 and every kind of drafter for the tests of beams."""

from __future__ import annotations

from functools import cache
from typing import Any

from fsd_infer import Drafter, Target
from tests.families import drafter_of, tiny_model

NO_FP64 = {"qwen3_moe", "mixtral", "gpt_oss"}  # torch has no grouped product in fp64


@cache
def doubled(family: str) -> Any:
    """A random model in fp64: no two ways to compute its logits put nearly equal candidates in another order."""
    model = tiny_model(family)
    return model if family in NO_FP64 else model.double()


def drafters_for(target: Target) -> dict[str, Drafter]:
    return {name: drafter_of(name, target) for name in ("none", "lm", "reduced", "lookup", "recycle", "reduced+lookup")}
