"""No directory of a head, however malformed or foreign, ends in anything but one line that names it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsd_core.errors import CheckpointError, FsdError, VocabularyMismatchError
from fsd_infer import Target
from fsd_infer.drafters import EagleDrafter
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.heads.config import own_fields
from fsd_infer.heads.export import export_head
from fsd_infer.heads.formats import head_kind
from tests.families import VOCAB, altered, load_head, options_of, save_head, tiny_model
from tests.fuzzing import FUZZ, refusal, spoilt
from tests.test_head_formats import facts, make_head
from tests.test_head_formats import target as target  # a fixture

IDS = torch.arange(0, VOCAB, 3)
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {"layout": "fsd", "final_norm": True, "feature_scale": True, "fused_layers": [1, 4]}),
    "ours, eagle3": ("ours", {"layout": "eagle3"}),
    "old": ("old", {"layout": "fsd", "num_layers": 2}),
    "eagle": ("vllm", {"layout": "eagle"}),
    "eagle3": ("vllm", {"layout": "eagle3"}),
    "speculators": ("speculators", {"layout": "eagle3", "fc_norm": True}),
}


def to_old_format(directory: Path) -> None:
    """The options stood under "head" until heads became models of transformers."""
    values = json.loads((directory / "config.json").read_text())
    config = {name: values.pop(name) for name in ("target", "training")} | {"format": "fsd-eagle-head", "version": 2}
    config["head"] = {name: value for name, value in values.items() if name in own_fields()}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of each kind of head."""
    root = tmp_path_factory.mktemp("heads")
    for name, (to, options) in SOURCES.items():
        head = make_head(target, IDS, **options)
        if to in ("ours", "old"):
            save_head(root / name, head, target.fingerprint())
            if to == "old":
                to_old_format(root / name)
        else:
            export_head(head, root / name, to, facts(target))
    return root


def loads(directory: Path, target: Target) -> bool:
    """Is it a head; if not, that is told in a line of some length."""
    ways = (lambda: head_kind(directory), lambda: load_head(directory, target), lambda: load_head(directory))
    errors = list(map(refusal, ways))
    assert all(len(str(error)) < 900 for error in errors)
    return errors[1] is None and errors[2] is None


@settings(FUZZ, max_examples=40)
@given(data=st.data())
def test_any_option_of_a_config_may_be_anything(
    data: st.DataObject, heads: Path, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A value is replaced, removed or added, once or twice: what loads must still be a head that runs."""
    source = heads / data.draw(st.sampled_from(sorted(SOURCES)))
    config = json.loads((source / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        config = spoilt(config, data.draw) or {"": 1}
    text = json.dumps(config).encode("utf-8", "surrogatepass")
    directory = altered(source, tmp_path_factory.mktemp("case") / "head", text)
    if loads(directory, target):
        head = load_head(directory, target)
        out = head(torch.randn(1, 3, 32), torch.randn(1, 3, head.config.feature_width), torch.arange(3)[None])
        assert out.shape == (1, 3, 32)
    shutil.rmtree(directory)


LAYERS = "transformer_layer_config"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDINGS, NORM, UP = "embed_tokens.weight", "layers.0.input_layernorm.weight", "layers.0.mlp.up_proj.weight"
ROPE = {"rope_parameters": {"rope_type": "default"}}
OF_TARGET = {"hidden_size": 32, "vocab_size": VOCAB}
OF_TYPES = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {}}
TIED = {EMBEDDINGS: torch.ones(97, 32), "lm_head.weight": None, "d2t": None, "t2d": None}
# a kind of head, what its config and its tensors have instead, and what is said of it
FAULTS: list[tuple[str, Any, Any, str]] = [
    ("ours", b"[1, 2]", {}, "holds list, not an object"),
    ("ours", b"\xff\xfe{}", {}, "not UTF-8"),
    ("ours", b"[" * 100_000 + b"]" * 100_000, {}, "nested too deep"),
    ("ours", b'{"version": ' + b"9" * 5000 + b"}", {}, "cannot be read"),
    ("ours", b'{"format": "other"}', {}, "is not a head's|without|has no"),
    ("ours", {"target": {}}, {}, "target does not say its hidden_size, vocab_size"),
    ("ours", {"target": {**OF_TARGET, "model_type": "qwen2"}}, {}, "model_type.*qwen2"),
    ("ours", {"target": {**OF_TARGET, "vocab_size": 98}}, {}, "vocabulary"),
    ("ours", {"final_norn": 1}, {}, "unknown head option 'final_norn'. Did you mean"),
    ("ours", {"dtype": "nn"}, {}, "dtype must be one of floating-point numbers"),
    ("old", {"version": 99}, {}, "is of version 99, newer than this program reads"),
    ("ours", {}, {"draft_ids": lambda ids: ids.float() * torch.nan}, "draft_ids is of type F32"),
    ("ours", {}, {"draft_ids": lambda ids: ids - 5}, "distinct ids from 0 to 96"),
    ("ours", {}, {"draft_ids": lambda ids: ids // 4}, "distinct ids from 0 to 96"),
    ("ours", {}, {"draft_ids": lambda ids: ids[:-1].clone()}, f"wanted are {len(IDS)} ids"),
    ("ours", {}, {"fc.weight": lambda weight: weight.to(torch.int8)}, "is a quantised head .fc.weight."),
    ("ours", {}, {"fc.weight": lambda weight: weight[:, :-1].clone()}, r"wrong shape \['fc.weight'\]"),
    ("ours", {}, None, "has no model.safetensors"),
    ("eagle3", {"eagle_config": {LAYER_IDS: [2, 4, 5]}}, {}, "the latter should be one less"),
    ("eagle3", {LAYER_IDS: [2, 4], "eagle_config": None}, {}, r"fuses 3 layers, but config.json names \[1, 3\]"),
    ("eagle", {"bias": True}, {"fc.bias": None}, r"missing \['fc.bias'\]"),
    ("eagle", {"bias": "false"}, {}, "bias in its config.json must be true or false, got 'false'"),
    ("eagle3", {"norm_before_fc": True}, {}, r"missing \['input_norm.weight'\]"),
    ("eagle3", {"eagle_config": {"norm_output": True}}, {}, "says norm_output twice, True and False"),
    ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, {}, "final features alone"),
    ("eagle3", {"layer_types": ["sliding_attention"], "sliding_window": 8}, {}, "attend to 8 tokens alone"),
    ("eagle3", {"use_sliding_window": True, "sliding_window": "8"}, {}, "sliding_window .* must be a number, got '8'"),
    ("eagle3", {"draft_vocab_size": 77}, {}, f"draft_vocab_size is 77 .*, and {len(IDS)} by its tensors"),
    ("eagle3", {"rope_scaling": {"type": "linear", "factor": 2.0}, **ROPE}, {}, "says rope_type twice"),
    ("eagle3", {"rope_theta": None, "rope_parameters": OF_TYPES}, {},
     "rope_parameters differs between types of layers"),
    ("eagle3", {"tie_word_embeddings": True, "draft_vocab_size": None}, TIED,
     "tie_word_embeddings and no lm_head.weight"),
    ("eagle3", {}, {EMBEDDINGS: torch.zeros(98, 32)}, r"embed_tokens.weight is of shape \[98, 32\], not a table of 97"),
    ("eagle3", {}, {"lm_head.weight": torch.tensor(1.0)}, "d2t is of shape .*, lm_head of 0 rows"),
    ("eagle3", {}, {"t2d": torch.ones(98).bool()}, r"t2d is of shape \[98\] for a vocabulary of 97"),
    ("eagle3", {}, {"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, "quantised head .*up_proj.weight_scale"),
    ("eagle3", {}, {"model.fc.weight": torch.zeros(32, 96)}, "fc.weight and .*fc.weight are the same tensor"),
    ("eagle3", {}, {"d2t": torch.zeros(len(IDS))}, "d2t is of type F32, not whole numbers"),
    ("eagle3", {}, {"d2t": lambda offsets: offsets + 5000}, "distinct ids from 0 to 96"),
    ("eagle3", {}, {"t2d": lambda drafted: ~drafted}, "d2t and t2d name different ids"),
    ("eagle3", {}, {"t2d": lambda drafted: drafted.cumsum(0), "d2t": None}, "t2d holds other numbers than 0 and 1"),
    ("eagle3", {"rope_theta": 0}, {}, "rope_theta is 0, which no model has"),
    ("eagle3", {"rope_scaling": {"factor": 2.0, "full_attention": {}}}, {},
     "says other rotary options than those of its types"),
    ("eagle3", {}, {"d2t": None, "t2d": None}, "has no d2t to say which"),
    ("eagle3", {}, {"fc.weight": torch.zeros(32, 97)}, "fuses no whole number of layers"),
    ("eagle3", {"num_hidden_layers": 10**9}, {}, "names 1000000000 layers"),
    ("eagle3", {}, {"midlayer.self_attn.kv_b_proj.weight": torch.zeros(3)}, r"missing .*kv_a_proj_with_mqa"),
    ("eagle", {}, {"layers.0.self_attn.kv_b_proj.weight": torch.zeros(3)}, "its layers have latent attention"),
    ("eagle3", {"speculators_model_type": "eagle3", "norm_before_residual": None}, {}, "not say norm_before_residual"),
    ("eagle3", {}, None, "is an EAGLE-3 head of another program, without model.safetensors"),
    ("speculators", {"speculators_model_type": "eagle9"}, {}, "is a head of speculators of type 'eagle9'"),
    *(
        ("eagle", {"architectures": [name]}, {}, f"its layers are those of {kind}, unknown here")
        for name, kind in (("EagleDeepSeekMTPModel", "deepseek"), ("EagleMiniCPMForCausalLM", "minicpm"))
    ),
    ("eagle", {"layernorms": True}, {}, "layernorms True, which is not known here"),
    ("eagle", {"vocab_size": None}, {EMBEDDINGS: torch.zeros(98, 32)}, "vocab_size: 98 against 97"),
    ("eagle", {"vocab_size": None}, {}, "vocab_size must be a whole number from 1 to .*, got None"),
    ("eagle", {}, {UP: lambda weight: weight * torch.nan}, f"{UP} holds NaN or infinite numbers"),
    ("eagle", {}, {UP: None}, rf"missing \['{UP}'\]"),
    ("eagle", {"hidden_size": None}, {}, "does not describe a Llama layer.*hidden_size"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "config", "tensors", "message"), FAULTS)
def test_faults_are_named(
    source: str, config: Any, tensors: Any, message: str, heads: Path, target: Target, tmp_path: Path
) -> None:
    directory = altered(heads / source, tmp_path / "head", config, tensors)
    for load in (load_head, load_drafter):
        with pytest.raises((CheckpointError, VocabularyMismatchError), match=message) as raised:
            load(directory, target)
        text = str(raised.value)
        assert str(directory) in text and len(text.splitlines()) == 1 + text.endswith(
            "model.safetensors')"
        )  # a command
    assert not loads(directory, target)


def test_without_a_target_the_fused_layers_have_to_be_named(heads: Path, tmp_path: Path) -> None:
    without = altered(heads / "eagle3", tmp_path / "bare", {LAYER_IDS: None, "eagle_config": None})
    with pytest.raises(CheckpointError, match="does not say which layers it fuses"):
        load_head(without)
    with pytest.raises(CheckpointError, match="but config.json has no .*, and the usual ones of .* are"):
        load_head(without, Target(tiny_model("llama")))


def test_the_old_format_is_the_same_head(heads: Path, target: Target, tmp_path: Path) -> None:
    to_old_format(shutil.copytree(heads / "ours", tmp_path / "old"))
    old, ours = (load_head(directory, target) for directory in (tmp_path / "old", heads / "ours"))
    assert options_of(old) == options_of(ours) and old.config.target == ours.config.target == target.fingerprint()
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in ours.state_dict().items())


def renamed(by: Any) -> Any:
    """A change of a head's tensors to other names."""
    return lambda stored: [stored.update({by(name): stored.pop(name)}) for name in list(stored)]


LONG = {"sliding_window": 4096.0, "layer_types": ["sliding_attention"]}  # beyond max_position_embeddings
COPIED = {"logit_scale": 0.0625, "attention_value_scale": 0.7, "draft_vocab_size": 5, "target_hidden_size": 8}
# a kind of head, its tensors in another program's files, and further options there: at the top, and of its layers
SPELLINGS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "below two modules": ("eagle", renamed(lambda name: f"model.draft_model.{name}"), {}),
    "below one module twice": ("eagle3", renamed(lambda name: f"model.model.{name}"), {}),
    "no window": ("eagle3", {}, {"use_sliding_window": True, "sliding_window": False, "norm_output": 0}),
    "layers' options copied from a target": (
        "speculators", {}, {"layer_types": ["full_attention"], "max_position_embeddings": 7, LAYERS: LONG | COPIED}
    ),
    "but its LM head": (
        "eagle3", renamed(lambda name: name if name[:2] in ("lm", "d2", "t2") else f"model.{name}"), {}
    ),
    "t2d alone": ("eagle3", {"d2t": None}, {}),
    "t2d of whole numbers": ("eagle3", {"t2d": lambda drafted: drafted.long()}, {}),
    "its target's model type": ("eagle3", {}, {"model_type": "qwen3"}),
    "with scales of rounded keys": ("eagle3", {"midlayer.self_attn.k_scale": torch.ones(1)}, {}),
    "rotary options by type of layer": (
        "eagle3", {}, {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 10000.0}}}
    ),
    "rotary base beside its scaling": (
        "eagle3", {}, {"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 10000.0}}
    ),
    "speculators' of old": (
        "eagle", renamed(lambda name: re.sub(r"^fc\.", "fusion_fc.", name.replace("layers.0.", "transformer."))),
        {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_are_the_same_head(spelling: str, heads: Path, target: Target, tmp_path: Path) -> None:
    source, tensors, changes = SPELLINGS[spelling]
    stored = json.loads((heads / source / "config.json").read_text())
    config = {name: stored[name] | value if name == LAYERS else value for name, value in changes.items()}
    found = load_drafter(str(altered(heads / source, tmp_path / "head", config, tensors)), target)
    wanted = load_head(heads / source, target)
    assert isinstance(found, EagleDrafter) and options_of(found.head) == options_of(wanted)
    assert all(torch.equal(value, found.head.state_dict()[name]) for name, value in wanted.state_dict().items())


@pytest.mark.parametrize(("source", "part"), [("eagle3", "text_config"), ("eagle", "model")])
def test_a_part_of_the_config_may_have_the_options(
    source: str, part: str, heads: Path, target: Target, tmp_path: Path
) -> None:
    """As for targets that see, with their M-RoPE, and in vLLM's first layout."""
    directory = altered(heads / source, tmp_path / "head")
    config = json.loads((directory / "config.json").read_text())
    inner = {**config, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    assert "rope_parameters" not in inner
    (directory / "config.json").write_text(json.dumps({"architectures": config["architectures"], part: inner}))
    found, wanted = load_head(directory, target), load_head(heads / source, target)
    assert found.config.layer["rope_parameters"].pop("mrope_section") == [2, 1, 1]
    assert options_of(found) == options_of(wanted)
    embeds, features = torch.randn(1, 5, 32), torch.randn(1, 5, wanted.config.feature_width)
    assert torch.equal(*(head(embeds, features, torch.arange(5)[None]) for head in (found, wanted)))


@pytest.mark.parametrize("place", [{"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}])
def test_a_norm_over_all_fused_layers_comes_before_fc(
    place: dict[str, Any], heads: Path, target: Target, tmp_path: Path
) -> None:
    weight = torch.rand(96) + 0.5
    plain = load_head(heads / "eagle3", target)
    config = {**place, "norm_before_fc": place.get("norm_before_fc")}
    head = load_head(altered(heads / "eagle3", tmp_path / "head", config, {"input_norm.weight": weight}), target)
    embeds, features, places = torch.randn(1, 5, 32), torch.randn(1, 5, 128), torch.arange(5)[None]
    inner = features[..., 32:]
    normed = inner / (inner.square().mean(-1, keepdim=True) + head.config.layer["rms_norm_eps"]).sqrt() * weight
    wanted = plain(embeds, torch.cat([features[..., :32], normed], -1), places)
    torch.testing.assert_close(head(embeds, features, places), wanted, rtol=1e-5, atol=1e-5)
    recycled = head(embeds, wanted, places)  # the head's own outputs are not normed
    torch.testing.assert_close(recycled, plain(embeds, wanted, places))


def test_weights_of_another_name_are_to_be_renamed(heads: Path, target: Target, tmp_path: Path) -> None:
    directory = altered(heads / "eagle3", tmp_path / "head")
    (directory / "model.safetensors").rename(directory / "draft.safetensors")
    with pytest.raises(CheckpointError, match="Rename its draft.safetensors to model.safetensors"):
        load_drafter(str(directory), target)
    shutil.copy(directory / "draft.safetensors", directory / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"needs their model.safetensors.index.json: copy it, too"):
        load_drafter(str(directory), target)


@pytest.mark.parametrize("legacy", [True, False])
def test_pickles_are_refused_and_converted_by_the_user(
    legacy: bool, heads: Path, target: Target, tmp_path: Path
) -> None:
    """A config that names no kind of head leaves the pickle's own names to tell it."""
    for source, config, kind in (("eagle", {}, ""), ("eagle3", b'{"model_type": "llama"}', "is an EAGLE-3 head .*")):
        head = load_head(heads / source, target)
        directory = altered(heads / source, tmp_path / source, config, None)
        weights = {**head.state_dict(), **({"d2t": IDS} if kind else {})}
        torch.save(weights, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(CheckpointError, match=f"{kind}Nothing is unpickled here") as raised:
            load_drafter(directory, target)
        if source == "eagle":
            exec(str(raised.value).splitlines()[-1], {})
            assert torch.equal(load_head(directory, target).fc.weight, head.fc.weight)


def test_options_of_parts_that_no_head_reads_may_be_anything(heads: Path, target: Target, tmp_path: Path) -> None:
    tuned = altered(heads / "eagle", tmp_path / "tuned", {"peft_config": {"default": {"bias": "none"}}})
    assert load_drafter(str(tuned), target, None).name == "eagle"


def test_a_head_that_reads_final_features_needs_no_list_of_layers() -> None:
    """LongCat-Flash counts twice as many layers as its list has."""
    model = tiny_model("llama")
    model.config.num_hidden_layers = 99
    whole = Target(model)
    whole.capture_layers([])
    with pytest.raises(FsdError, match="no list of 99 decoder layers"):
        whole.capture_layers([0])
