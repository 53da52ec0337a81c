"""Gemma-4 assistants that do not fit are refused by name; tests/test_published_heads.py has how they draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsd_core.errors import FsdError
from fsd_infer import Target
from fsd_infer.drafters.loading import load_drafter
from tests.published_assistants import LAYER, TARGETS, TYPES, H, assisted_target, random_model
from tests.published_blocks import Layout, tiny_target
from tests.published_heads import layout
from tests.rules_toy import V


def gemma(**changes: Any) -> Target:
    """A target without shared keys."""
    types = ["sliding_attention", *TYPES, "sliding_attention"]
    given = {**LAYER, **TARGETS["own keys"], "vocab_size_per_layer_input": V, "hidden_size": H, "layer_types": types}
    return Target(random_model(**given | changes))


def without_projection(made: Layout) -> None:
    del made.tensors["pre_projection.weight"]


def further(made: Layout) -> None:
    made.tensors["model.fusion.weight"] = torch.zeros(16, 12)


def unchanged(made: Layout) -> None:
    pass


FIRST_SLIDES = ["sliding_attention", *["full_attention"] * 3]
FAULTS: dict[str, tuple[Callable[[Layout], None], Callable[[], Target], str]] = {
    "another family": (unchanged, lambda: Target(tiny_target()), "reads the keys of a Gemma-4 target, .* is llama"),
    "another width": (unchanged, lambda: gemma(hidden_size=20), "is for 16 features, and .* has 20"),
    "another vocabulary": (unchanged, lambda: gemma(vocab_size=5), "drafts over 4 tokens, and .* has 5"),
    "other key heads": (unchanged, lambda: gemma(num_key_value_heads=4), r"sliding_attention it reads \(2, 8\)"),
    "the first layer": (
        unchanged,
        lambda: gemma(layer_types=FIRST_SLIDES),
        "none .* but the first keeps keys of sliding",
    ),
    "a missing tensor": (without_projection, lambda: assisted_target("own keys"), "missing_keys.*pre_projection"),
    "an unknown tensor": (further, lambda: assisted_target("own keys"), "unexpected_keys.*fusion"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    change, target, words = FAULTS[fault]
    made = layout("shared keys of gemma4")
    copied = Layout(made.config, dict(made.tensors), made.estimate, made.depth)
    change(copied)
    with pytest.raises(FsdError, match=words):
        load_drafter(str(copied.write(tmp_path)), target())
