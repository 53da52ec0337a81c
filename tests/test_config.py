"""FuzzyConfig and RuntimeConfig: what they hold, save and refuse, and the former names of their fields."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import fsd_infer
from fsd_core.errors import FsdError
from fsd_core.options import add_models
from fsd_infer import FuzzyConfig, FuzzyDecoder, RuntimeConfig, Target, TreeShape
from fsd_infer.decoder.config import OWN, FuzzyOptions
from fsd_infer.drafters import NoDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine.beams import BeamOptions
from fsd_infer.engine.callbacks import Streaming
from fsd_infer.request.options import GenerateOptions
from fsd_infer.rules import RULES, Fuzzy, Tilted
from tests.families import tiny_head, tiny_model

PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def decoder() -> FuzzyDecoder:
    target = Target(tiny_model("llama"))
    return FuzzyDecoder(target, tiny_head(target, TreeShape(3, 2, 6)))


def test_generate_and_the_config_take_the_same_fields_of_the_same_types() -> None:
    ours = {name: hint for name, hint in FuzzyOptions.__annotations__.items() if name in OWN}
    named = {name: getattr(hint, "__forward_arg__", hint) for name, hint in ours.items()}
    assert named == vars(FuzzyConfig)["__annotations__"] and named.keys() == OWN.keys()
    assert FuzzyOptions.__annotations__.keys() == OWN.keys() | GenerateOptions.__annotations__.keys()


def test_a_request_is_saved_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{}")
    config = FuzzyConfig(
        rule=[Fuzzy("js", threshold=0.4), "exact"], tree=TreeShape(5, 6, 16, 0.3), seed=7, users=["a", "b"],
        guide={"json": {"type": "object"}}, beams=BeamOptions(depth=2), temperature=0.5, top_p=0.9, max_new_tokens=9,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").read_text() == "{}", "a model's own configuration stays"
    written = json.loads((tmp_path / "fuzzy_config.json").read_text())
    assert written.keys() - {"transformers_version"} == {
        "rule", "tree", "seed", "users", "guide", "beams", "temperature", "top_p", "max_new_tokens", "do_sample"
    }  # fmt: skip
    assert written["rule"] == ["fuzzy:threshold=0.4", "exact"] and written["tree"] == "5,6,16,0.3"
    loaded = FuzzyConfig.from_pretrained(tmp_path, max_new_tokens=4)
    assert loaded.max_new_tokens == 4 and loaded.seed == 7 and loaded.do_sample
    loaded.max_new_tokens = 9
    assert loaded == config
    with pytest.raises(FsdError, match=r"has no fuzzy_config\.json"):
        FuzzyConfig.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "fuzzy_config.json").write_text('{"rul": "exact"}')
    with pytest.raises(FsdError, match=r"fuzzy_config\.json: unknown option .* Did you mean 'rule'"):
        FuzzyConfig.from_pretrained(tmp_path)


def test_a_saved_bias_is_read_and_malformed_files_are_named(tmp_path: Path, decoder: FuzzyDecoder) -> None:
    FuzzyConfig(sequence_bias={(5,): -50.0, (7, 8): 9.0}, max_new_tokens=9).save_pretrained(tmp_path)
    loaded = FuzzyConfig.from_pretrained(tmp_path)
    given = decoder.generate(PROMPT, sequence_bias={(5,): -50.0, (7, 8): 9.0}, max_new_tokens=9)
    assert decoder.generate(PROMPT, loaded).sequences == given.sequences
    for content in ("[]", '{"max_new_tokens": "x"}', "{", "5"):
        (tmp_path / "fuzzy_config.json").write_text(content)
        with pytest.raises(FsdError, match=r"fuzzy_config\.json"):
            FuzzyConfig.from_pretrained(tmp_path)


def test_a_runtime_is_saved_and_loaded(tmp_path: Path) -> None:
    config = RuntimeConfig(weights="expanded", draft_weights="plain", recording=False, prefix_cache_bytes=1 << 20)
    config.save_pretrained(tmp_path / "new")
    assert RuntimeConfig.from_pretrained(tmp_path / "new") == config
    assert RuntimeConfig.from_pretrained(tmp_path / "new", recording=None).recording is None
    (tmp_path / "new" / "runtime_config.json").write_text('{"weight": "auto"}')
    with pytest.raises(FsdError, match="runtime_config.json: unknown option .* 'weight'. Did you mean 'weights'"):
        RuntimeConfig.from_pretrained(tmp_path / "new")


REFUSED: list[tuple[type[Any], dict[str, Any], str]] = [
    (FuzzyConfig, {"ruel": "exact"}, "Did you mean 'rule'?"),
    (FuzzyConfig, {"temperatue_": 1.0}, "Did you mean 'temperature'?"),
    (FuzzyConfig, {"tree": "5,6"}, "a tree is written depth,width,nodes"),
    (FuzzyConfig, {"tree": 5}, "a tree is a TreeShape or text"),
    (FuzzyConfig, {"beams": {"dept": 4}}, "unknown beam option 'dept'. Did you mean 'depth'?"),
    (FuzzyConfig, {"beams": 4}, "beams are written"),
    (FuzzyConfig, {"seed": 2**70}, "at most 64 bits"),
    (FuzzyConfig, {"seed": True}, "seed must be a whole number"),
    (FuzzyConfig, {"max_cache_bytes": 1.5}, "whole number of bytes"),
    (FuzzyConfig, {"apply_chat_template": "no"}, "apply_chat_template is True or False, got 'no'"),
    (FuzzyConfig, {"num_return_sequences": "2"}, "num_return_sequences must be a whole number, got '2'"),
    (RuntimeConfig, {"record": 5}, "record lists pairs of rows and tokens"),
    (RuntimeConfig, {"weights": "plane"}, "auto, packed, expanded, plain, got 'plane'. Did you mean 'plain'?"),
    (RuntimeConfig, {"prefix_cache_bytes": 0}, "at least 1"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_values_that_cannot_be_are_refused_by_name(
    kind: type[Any], fields: dict[str, Any], message: str, decoder: FuzzyDecoder
) -> None:
    with pytest.raises(FsdError, match=re.escape(message)):
        kind(**fields)
    if kind is FuzzyConfig:
        with pytest.raises(FsdError, match=re.escape(message)):
            decoder.generate(PROMPT, max_new_tokens=2, **fields)


def test_config_and_keywords_are_the_same_request(decoder: FuzzyDecoder) -> None:
    fields: dict[str, Any] = {"rule": "tilted", "tree": "2,1,3", "seed": 3, "temperature": 0.9, "max_new_tokens": 12}
    wanted = decoder.generate(PROMPT, **fields)
    config = FuzzyConfig(**fields)
    found = decoder.generate(PROMPT, config)
    assert found.sequences == wanted.sequences and found.stats.rule == wanted.stats.rule == Tilted().describe()
    assert found.stats.drafter["nodes"] == 3 and decoder.drafter.describe()["nodes"] == 6  # type: ignore[index]
    assert decoder.generate(PROMPT, config, max_new_tokens=5).sequences == [wanted.sequences[0][:5]]
    assert config.max_new_tokens == 12, "overrides are for one call"
    greedy = (GenerationConfig(do_sample=False, max_new_tokens=12), FuzzyConfig(max_new_tokens=12))
    assert len({str(decoder.generate(PROMPT, each).sequences) for each in greedy}) == 1
    ids = torch.tensor([PROMPT])
    hook = dict(custom_generate=fsd_infer.generate, drafter=decoder.drafter)
    for options in ({"generation_config": FuzzyConfig(**fields, top_k=0)}, fields | {"do_sample": True, "top_k": 0}):
        made = decoder.target.model.generate(ids, **hook, **options)
        assert made[0, len(PROMPT) :].tolist() == wanted.sequences[0]


@pytest.mark.parametrize("name", ["lookup", "recycle", "lookup+recycle", "memory"])
def test_a_request_shapes_trees_without_a_model(name: str, decoder: FuzzyDecoder) -> None:
    drafter = load_drafter(name, decoder.target, "auto")
    options: dict[str, Any] = {"max_new_tokens": 24, "drafter": drafter}
    wanted, shaped = (decoder.generate(PROMPT * 3, tree=tree, **options) for tree in (None, "4,2,5"))
    assert shaped.sequences == wanted.sequences and shaped.stats.drafter["nodes"] == 5  # type: ignore[index]
    assert drafter.max_nodes > 5 and drafter.bounds is not None, "the request's copy is another"
    one, other = (drafter.with_shape(TreeShape(4, 2, 5)).recording_key for _ in range(2))
    assert one == other != drafter.recording_key


def test_a_tree_that_a_request_cannot_have_is_refused(decoder: FuzzyDecoder) -> None:
    with pytest.raises(FsdError, match="load it with this tree"):
        decoder.generate(PROMPT, tree="2,1,3", drafter=NoDrafter(decoder.target.vocab_size))
    with pytest.raises(FsdError, match="rule 'calibrated' brings a tree"):
        decoder.generate(PROMPT, rule="calibrated", tree="2,1,3")


REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"chat": False}, {"apply_chat_template": False}), ({"cache_keys": ["a"]}, {"users": ["a"]}),
    ({"beam_options": BeamOptions(depth=1), "num_beams": 2}, {"beams": "depth=1", "num_beams": 2}),
    ({"on_tokens": lambda row, tokens: True}, {"callbacks": [Streaming(lambda row, tokens: True)]}),
    ({"ends": lambda row, token: "stop"}, {"max_new_tokens": 1}), ({"on_round": lambda row, round: None}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("former", "now"), REQUESTS)
def test_former_names_of_a_request_mean_the_new_ones(
    former: dict[str, Any], now: dict[str, Any], decoder: FuzzyDecoder, unsaid: None
) -> None:
    common: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": []}
    with pytest.warns(FutureWarning, match=next(iter(former))) as said:
        made = decoder.generate([PROMPT], **{**common, **former})
    assert len(said) == 1 and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert made.sequences == decoder.generate([PROMPT], **{**common, **now}).sequences
        decoder.generate([PROMPT], **{**common, **former})  # said once


def test_a_rule_as_second_argument_works_with_a_warning(decoder: FuzzyDecoder, unsaid: None) -> None:
    with pytest.warns(FutureWarning, match="rule=") as said:
        made = decoder.generate(PROMPT, "tilted", max_new_tokens=4)  # type: ignore[arg-type]
    assert len(said) == 1 and made.stats.rule == Tilted().describe()


RUNTIME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pack": False}, {"weights": "plain"}), ({"pack": True}, {"weights": "packed"}),
    ({"pack": None, "expand": True}, {"weights": "expanded"}), ({"pack": False, "expand": True}, {"weights": "plain"}),
    ({"quantize": False}, {"draft_weights": "plain"}), ({"cuda_graphs": False}, {"recording": False}),
    ({"capture": False}, {"recording": False}),
]  # fmt: skip


@pytest.mark.parametrize(("former", "now"), RUNTIME)
def test_former_names_of_a_runtime_mean_the_new_ones(former: dict[str, Any], now: dict[str, Any], unsaid: None) -> None:
    model = tiny_model("llama")
    with pytest.warns(FutureWarning) as said:
        made = FuzzyDecoder.from_pretrained(model, "none", **former)
    assert len(said) == 1 and made.config == RuntimeConfig(**now)


def test_a_runtimes_former_field_is_read_and_given_with_one_warning(unsaid: None, tmp_path: Path) -> None:
    with pytest.warns(FutureWarning) as said:
        made = RuntimeConfig(capture=False)  # type: ignore[call-arg]
        assert made.capture is made.recording is False and RuntimeConfig.from_dict({"capture": False}) == made
    assert [str(one.message).partition(" works")[0] for one in said] == [
        "RuntimeConfig(capture=...)", "RuntimeConfig.capture", "capture",
    ]  # fmt: skip


def test_names_that_moved_are_found_with_a_warning() -> None:
    for module, names in fsd_infer._MOVED_FROM_HERE.items():
        for name in names:
            vars(fsd_infer).pop(name, None)
            with pytest.warns(FutureWarning, match=f"{name} is now in {module}"):
                getattr(fsd_infer, name)
    assert set(RULES) and fsd_infer.Generation is fsd_infer.GenerateOutput
    with pytest.raises(AttributeError):
        fsd_infer.Nothing  # noqa: B018


def test_former_options_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_models(parser)
    args = parser.parse_args(["--expand", "--no-quantize", "--no-cuda-graphs"])
    assert (args.weights, args.draft_weights, args.recording) == ("expanded", "plain", False)
    assert "--no-cuda-graphs works until fsd-toolkit 0.2: write --no-recording." in capsys.readouterr().err
    assert "--expand" not in parser.format_help() and parser.parse_args(["--capture"]).recording is True


def test_the_public_surface() -> None:
    generate, load = FuzzyDecoder.generate, FuzzyDecoder.from_pretrained
    assert len(inspect.signature(generate).parameters) - 1 == 6
    assert len(inspect.signature(load).parameters) == 7
    assert len(fsd_infer.__all__) == 12 and all(hasattr(fsd_infer, name) for name in fsd_infer.__all__)


def test_every_field_is_documented() -> None:
    for kind, names in ((FuzzyConfig, OWN), (RuntimeConfig, RuntimeConfig().to_dict())):
        text = inspect.getdoc(kind) or ""
        assert all(f"\n    {name}: " in text for name in names), kind
