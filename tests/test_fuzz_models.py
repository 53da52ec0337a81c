"""Malformed models, and arguments of any type in Python: each ends in one of our errors, or in an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from fsd_infer import FuzzyDecoder
from tests.bench_toys import Toy
from tests.fuzzing import FUZZ, refusal
from tests.test_head_malformed import JUNK, changed, places


@settings(FUZZ, max_examples=25)
@given(data=st.data())
def test_model_directories(data: st.DataObject, toy: Toy, tmp_path: Path) -> None:
    """A target whose JSON files hold anything."""
    directory = tmp_path / "model"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(toy.target, directory)
    kinds = ["config.json", "config.json", "config.json", "generation_config.json", "tokenizer_config.json"]
    file = directory / data.draw(st.sampled_from(kinds))
    config = json.loads(file.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        new = data.draw(st.sampled_from([*JUNK, KeyError]))
        config = changed(config, data.draw(st.sampled_from(places(config))), new) or {"": 1}
    file.write_text(json.dumps(config))
    loaded: list[Any] = []
    load = dict(dtype=torch.float32, device="cpu", pack=False)
    if refusal(lambda: loaded.append(FuzzyDecoder.from_pretrained(str(directory), "none", **load))) is None:
        refusal(lambda: loaded[0].generate("the cat", max_new_tokens=2, do_sample=False))


ARGUMENTS = ("seed", "chat", "max_cache_bytes", "streamer", "drafter", "prompts", "rule", "beam_options")
OPTIONS = sorted({*vars(GenerationConfig()), *ARGUMENTS, "logits_processor", "stopping_criteria", "generation_config"})
VALUES = [
    *JUNK,
    [1, 2],
    ["the"],
    {"x": 1},
    b"x",
    object(),
    2**70,
    torch.ones(2),
    ["exact", "exact"],
    [{"role": "user"}],
]


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_options_in_python(data: st.DataObject, toy_decoder: FuzzyDecoder) -> None:
    names = data.draw(st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=2, unique=True))
    given = {name: data.draw(st.sampled_from(VALUES)) for name in names}
    given = {"prompts": [5, 6, 7], "max_new_tokens": 2, "do_sample": False, **given}
    refusal(lambda: toy_decoder.generate(**given))
