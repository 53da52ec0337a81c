"""Targets that see images: greedy answers equal ``generate`` in fp32, for text alone and for prompts with images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from fsd_core.errors import ModelLoadError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.targets.kinds import auto_class
from fsd_infer.targets.loading import load_target
from tests.families import drafter_of, reference
from tests.seeing_toys import SEEING, save_seeing

LIMITS: dict[str, Any] = dict(max_new_tokens=12, do_sample=False)
PROMPTS = [[5, 60, 7, 41, 99], [17, 250, 33, 8, 120, 44, 61, 3, 90, 14, 15, 16], [200, 31, 12, 77, 140, 9, 10]]


FAST = ["gemma4", "qwen2_5_vl", "qwen3_5", "smolvlm", "llava", "mistral3"]
ALL = [*FAST, *(pytest.param(family, marks=pytest.mark.slow) for family in SEEING if family not in FAST)]


@pytest.mark.parametrize("family", ALL)
def test_text_alone_equals_generate(family: str, tmp_path: Path) -> None:
    """From a directory, chains and trees, in ragged batches."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = save_seeing(tmp_path, family)
    expected = reference(model, PROMPTS, **LIMITS)
    assert len({token for row in expected for token in row}) > 2, "degenerate model: the comparison would be hollow"
    loaded, tokenizer = load_target(str(tmp_path), dtype="fp32", device="cpu")
    assert type(loaded) is type(model) and tokenizer is not None
    target = Target(loaded, tokenizer)
    for name, least_tau in {"none": 1.0, "oracle": 2.0, "fused": 1.0}.items():
        if name == "fused" and not target.lm_head_is_plain:
            continue
        decoder = FuzzyDecoder(target, drafter_of(name, target, TreeShape(3, 3, 8)))
        batch = decoder.generate(PROMPTS, **LIMITS)
        assert batch.sequences == expected, f"{name}, ragged batch"
        assert batch.stats.tau >= least_tau, f"{name}: drafts that are right were not accepted"


AUDIO = ["qwen2_audio", "voxtral", "granite_speech"]
ENCODERS = ["florence2", "udop", "t5", "bart", "whisper"]


@pytest.mark.parametrize("family", [*AUDIO, *ENCODERS, "mllama", "idefics"])
def test_other_kinds_are_refused_by_name(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    with pytest.raises(ModelLoadError, match=re.escape(family)):
        auto_class(CONFIG_MAPPING[family]())
