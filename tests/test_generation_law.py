"""One law in Python, on the command line, in the server and in regenerate: no generation config shapes it."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import GenerationConfig

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.cli.commands import fuzzy_config
from fsd_infer.decoder.requests import prepare
from fsd_infer.request.options import shaping
from fsd_infer.serving.app import make_app
from fsd_train.data.backends import LocalBackend, RegenerationRequest
from tests.serve_toys import CHAT, COMPLETIONS, asked
from tests.text_toys import save_tiny_chat_target

OWN = {
    "repetition_penalty": 1.9,
    "no_repeat_ngram_size": 2,
    "min_p": 0.9,
    "typical_p": 0.1,
    "top_k": 1,
    "do_sample": True,
}
OWN |= {"temperature": 0.1, "suppress_tokens": [5, 6], "num_beams": 3}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> FuzzyDecoder:
    target = save_tiny_chat_target(tmp_path_factory.mktemp("plain"))
    return FuzzyDecoder.from_pretrained(str(target), "lookup", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target with a generation config that would change each of its answers."""
    target = save_tiny_chat_target(tmp_path_factory.mktemp("shaped"))
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**config, **OWN}))
    return target


def test_the_config_shapes_nothing_and_is_named(
    plain: FuzzyDecoder, shaped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt: dict[str, Any] = {"prompts": "the cat sat on the mat", "max_new_tokens": 12}
    with caplog.at_level(logging.WARNING):
        decoder = FuzzyDecoder.from_pretrained(str(shaped), "lookup", dtype=torch.float32, device="cpu")
    (said,) = [record.getMessage() for record in caplog.records if "generation config" in record.getMessage()]
    assert all(f"{name}=" in said for name in OWN)
    own = decoder.target.model.generation_config
    assert own.repetition_penalty == 1.9, "the toy should have its config"
    for options in ({}, {"temperature": 0}, {"temperature": 1.0, "do_sample": True, "seed": 1}):
        assert decoder.generate(**prompt, **options).sequences == plain.generate(**prompt, **options).sequences
    # a request names what it wants: one field, or the model's configuration
    for fields in ({"repetition_penalty": 1.9}, {"no_repeat_ngram_size": 2}):
        wanted = plain.target.model.generate(
            torch.tensor([plain.encode(prompt["prompts"])]), max_new_tokens=12, do_sample=False, **fields
        )[0, len(plain.encode(prompt["prompts"])) :].tolist()
        assert decoder.generate(**prompt, **fields).sequences == [wanted]
    greedy = GenerationConfig(repetition_penalty=1.9, max_new_tokens=12)
    named = decoder.generate(prompt["prompts"], generation_config=greedy).sequences
    assert named == decoder.generate(**prompt, repetition_penalty=1.9).sequences
    with TestClient(make_app(decoder)) as client, TestClient(make_app(plain)) as other:
        for fields in ({}, {"repetition_penalty": 1.0, "min_p": 0, "top_k": -1}, {"temperature": 1, "seed": 4}):
            body = asked(**fields)
            assert client.post(CHAT, json=body).json()["choices"] == other.post(CHAT, json=body).json()["choices"]
        body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "repetition_penalty": 1.9}
        text = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        made = plain.generate("the cat", chat=False, max_new_tokens=12, repetition_penalty=1.9)
        assert text == made.texts[0]
        for name, value in (("top_k", 1), ("min_p", 1.0), ("typical_p", 1e-6)):  # one token is left
            body = {**asked(temperature=2, seed=0, max_tokens=6), name: value}
            first = client.post(CHAT, json=body).json()["choices"]
            assert first == client.post(CHAT, json={**body, "seed": 1}).json()["choices"]
    # training rows follow the same law and end at the same tokens, whatever the tokenizer calls its eos
    decoder.tokenizer.eos_token = decoder.tokenizer.pad_token
    ids = plain.encode(prompt["prompts"])
    job = RegenerationRequest(id="a", messages=[], prompt_ids=ids, temperature=0.0, source="x")
    ((answer,),) = LocalBackend(decoder, 40, 0).answer([[job]], set())
    assert answer.response_ids == plain.generate([ids], max_new_tokens=40).sequences[0]


def test_no_top_k_unless_it_is_asked_for(plain: FuzzyDecoder) -> None:
    """transformers' own default is 50."""
    request, config = prepare(plain.target, [[5]], None, {"do_sample": True, "max_new_tokens": 3})
    assert not config.top_k and not request.processors
    request, _ = prepare(plain.target, [[5]], None, {"do_sample": True, "max_new_tokens": 3, "top_k": 7})
    assert [type(each).__name__ for each in request.processors or []] == ["TopKLogitsWarper"]


def test_a_length_of_the_request_is_instead_of_the_models(plain: FuzzyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    own = plain.target.model.generation_config
    for name, value in (("max_new_tokens", 3), ("max_length", 4)):
        with monkeypatch.context() as patch:
            patch.setattr(own, name, value)
            for asked_for, right in (({}, 3), ({"max_length": 9}, 8), ({"max_new_tokens": 7}, 7)):
                assert prepare(plain.target, [[5]], None, asked_for)[0].max_new_tokens == right
                given = GenerationConfig(**asked_for) if asked_for else None
                assert prepare(plain.target, [[5]], given, {})[0].max_new_tokens == right


def test_values_that_shape_nothing_are_not_named() -> None:
    config = GenerationConfig(top_k=0, top_p=1.0, min_length=0, do_sample=False, repetition_penalty=1.0, max_length=9)
    assert shaping(config) == {}
    given: dict[str, Any] = {"top_k": 50, "forced_eos_token_id": 0, "temperature": 0.0}
    assert shaping(GenerationConfig(**given)) == given


def test_further_options_on_the_command_line() -> None:
    args = argparse.Namespace(temperature=0.0, max_new_tokens=4, num_beams=1, beam_options=None, top_p=None, top_k=None)
    args.options, args.rule, args.seed, args.raw = {"repetition_penalty": 1.3}, "exact", None, False
    args.quality, args.schema, args.regex, args.max_cache_gib = None, None, None, None
    assert fuzzy_config(args).repetition_penalty == 1.3
    for wrong, words in (
        ({"do_sample": True}, "use --temperature"),
        ({"no_such": 1}, "unknown option 'no_such'"),
    ):
        args.options = wrong
        with pytest.raises(FsdError, match=words):
            fuzzy_config(args)
