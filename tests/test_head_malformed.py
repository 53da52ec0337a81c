"""No directory of a head, however malformed or foreign, ends in anything but one line that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsd_infer import Target, load_drafter
from fsd_infer.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.heads.config import own_fields
from fsd_infer.heads.export import export_head
from fsd_infer.heads.formats import head_kind
from fsd_infer.heads.head import EagleHead
from tests.families import VOCAB, load_head, options_of, save_head, tiny_model
from tests.fuzzing import FUZZ, changed, refusal, spoilt
from tests.test_head_formats import LAYERS, facts, make_head
from tests.train_toys import toy_target

IDS = torch.arange(0, VOCAB, 3)
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {"layout": "fsd", "final_norm": True, "feature_scale": True, "fused_layers": [1, 4]}),
    "ours, eagle3": ("ours", {"layout": "eagle3"}),
    "old": ("old", {"layout": "fsd", "num_layers": 2}),
    "eagle": ("vllm", {"layout": "eagle"}),
    "eagle3": ("vllm", {"layout": "eagle3"}),
    "speculators": ("speculators", {"layout": "eagle3", "fc_norm": True}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", num_hidden_layers=LAYERS))


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


@settings(FUZZ, max_examples=150)
@given(data=st.data())
def test_any_option_of_a_config_may_be_anything(
    data: st.DataObject, heads: Path, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A value is replaced, removed or added, once or twice: what loads must still be a head that runs."""
    source = heads / data.draw(st.sampled_from(sorted(SOURCES)))
    config = json.loads((source / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        config = spoilt(config, data.draw) or {"": 1}
    directory = tmp_path_factory.mktemp("case")
    shutil.copy(source / "model.safetensors", directory)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8", errors="surrogatepass")
    if loads(directory, target):
        head = load_head(directory, target)
        out = head(torch.randn(1, 3, 32), torch.randn(1, 3, head.config.feature_width), torch.arange(3)[None])
        assert out.shape == (1, 3, 32)
    shutil.rmtree(directory)


def reshaped(name: str, make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        new = make(tensors.pop(name))
        save_file({**tensors, **({} if new is None else {name: new})}, directory / "model.safetensors")

    return apply


def text(content: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / "config.json").write_bytes(content)


def config_with(path: tuple[str, ...], value: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))

    return apply


DRAFTED = len(IDS)
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no object": (text(b"[1, 2]"), "holds list, not an object"),
    "not UTF-8": (text(b"\xff\xfe{}"), "not UTF-8"),
    "too deep": (text(b"[" * 100_000 + b"]" * 100_000), "nested too deep"),
    "a number of 5000 digits": (text(b'{"version": ' + b"9" * 5000 + b"}"), "cannot be read"),
    "a target without facts": (config_with(("target",), {}), "target does not say its hidden_size, vocab_size"),
    "an option of a newer version": (config_with(("final_norn",), 1), "unknown head option 'final_norn'. Did you mean"),
    "another format": (text(b'{"format": "other"}'), "is not a head's|without|has no"),
    "no data type": (config_with(("dtype",), "nn"), "dtype must be one of floating-point numbers"),
    "draft ids of NaN": (reshaped("draft_ids", lambda ids: ids.float() * torch.nan), "draft_ids is of type F32"),
    "negative draft ids": (reshaped("draft_ids", lambda ids: ids - 5), "distinct ids from 0 to 96"),
    "draft ids beyond V": (reshaped("draft_ids", lambda ids: ids + 50), "distinct ids from 0 to 96"),
    "the same draft id twice": (reshaped("draft_ids", lambda ids: ids // 4), "distinct ids from 0 to 96"),
    "too few draft ids": (reshaped("draft_ids", lambda ids: ids[:-1].clone()), rf"wanted are {DRAFTED} ids"),
    "int8 weights": (reshaped("fc.weight", lambda w: w.to(torch.int8)), "quantised heads are not read"),
    "another width": (reshaped("fc.weight", lambda w: w[:, :-1].clone()), r"wrong shape \['fc.weight'\]"),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), "has no model.safetensors"),
    "a directory for weights": (
        lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()),
        "has no model.safetensors",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, heads: Path, target: Target, tmp_path: Path) -> None:
    apply, message = FAULTS[fault]
    directory = tmp_path / "head"
    shutil.copytree(heads / "ours", directory)
    apply(directory)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_head(directory, target)
    assert str(directory) in str(raised.value) and len(str(raised.value).splitlines()) == 1
    assert not loads(directory, target)


def test_the_old_format_is_the_same_head(heads: Path, target: Target, tmp_path: Path) -> None:
    for name in ("ours", "old"):
        directory = tmp_path / name
        shutil.copytree(heads / "ours", directory)
        if name == "old":
            to_old_format(directory)
    old, ours = (load_head(tmp_path / name, target) for name in ("old", "ours"))
    assert options_of(old) == options_of(ours) and old.config.target == ours.config.target == target.fingerprint()
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in ours.state_dict().items())
    config_with(("version",), 99)(tmp_path / "old")
    with pytest.raises(CheckpointError, match="is of version 99, newer than this program reads"):
        load_head(tmp_path / "old", target)


def public_config(head: EagleHead, **changes: Any) -> dict[str, Any]:
    """As EAGLE's repository has them, written by transformers 4: a base of positions instead of rope_parameters."""
    layer = dict(head.config.layer)
    theta = layer.pop("rope_parameters")["rope_theta"]
    layer.pop("head_dim", None)  # theirs have none
    config = {"architectures": ["LlamaForCausalLM"], "bias": head.config.fc_bias, "torch_dtype": "float16"}
    return {**layer, "rope_theta": theta, "num_hidden_layers": head.config.num_layers, **config, **changes}


def write_public(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, directory / "model.safetensors")
    return directory


def public_tensors(head: EagleHead, target: Target) -> dict[str, Tensor]:
    embeddings = target.model.get_input_embeddings().weight
    return {**head.state_dict(), "embed_tokens.weight": embeddings.detach().clone()}


def test_heads_of_other_sizes_and_tensors_are_refused(tmp_path: Path) -> None:
    target = toy_target()
    head = make_head(target)
    config, tensors = public_config(head), public_tensors(head, target)

    def refused(error: type[Exception], match: str, config: dict[str, Any] = config, **changes: Tensor | None) -> None:
        stored = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        directory = write_public(tmp_path / "head", config, stored)
        for load in (load_drafter, load_head):
            with pytest.raises(error, match=match):
                load(directory, target)

    embeddings = "embed_tokens.weight"
    refused(VocabularyMismatchError, r"vocab_size: 65 against 64", **{embeddings: torch.zeros(65, 32)})
    refused(CheckpointError, r"embed_size 16, but toy-llama has 32", **{embeddings: torch.zeros(64, 16)})
    refused(CheckpointError, r"hidden_size 48, but toy-llama has 32", {**config, "hidden_size": 48})
    refused(CheckpointError, "vocab_size must be a whole number from 1 to .*, got None", **{embeddings: None})
    refused(CheckpointError, r"missing \['layers.0.mlp.up_proj.weight'\]", **{"layers.0.mlp.up_proj.weight": None})
    refused(CheckpointError, r"unexpected \['lm_head.weight'\]", **{"lm_head.weight": torch.zeros(64, 32)})
    norm = "layers.0.input_layernorm.weight"
    refused(CheckpointError, rf"unexpected \['{norm}'\]", **{norm: torch.ones(32)})
    refused(CheckpointError, "wrong shape", {**config, "intermediate_size": 24})
    refused(CheckpointError, "does not describe a Llama layer.*hidden_size", {"model_type": "eagle"})
    refused(CheckpointError, "does not describe a Llama layer.*multiple", {**config, "num_attention_heads": 5})


def test_pickles_are_refused_and_converted_by_the_user(tmp_path: Path) -> None:
    target = toy_target()
    head = make_head(target)
    tensors = public_tensors(head, target)
    directory = write_public(tmp_path / "head", public_config(head), {})
    for legacy in (True, False):
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(CheckpointError, match="Nothing is unpickled here") as raised:
            load_drafter(directory, target)
    exec(str(raised.value).splitlines()[-1], {})
    assert torch.equal(load_head(directory, target).fc.weight, head.fc.weight)


def test_heads_of_other_programs_are_refused_by_name(tmp_path: Path) -> None:
    """By the config alone, since weights may be in a format that is not read, or by the tensors alone."""
    target = toy_target()

    def refused(config: dict[str, object], tensors: dict[str, Tensor], message: str) -> None:
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        write_public(directory, {"model_type": "llama", "hidden_size": 32, **config}, tensors)
        for load in (load_drafter, load_head):
            with pytest.raises(CheckpointError, match=f"{directory} is an? {message}"):
                load(directory, target)

    refused({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "EAGLE-3 head of another program, without model.safe")
    refused({"speculators_model_type": "eagle3"}, {}, "EAGLE-3 head of another program, without model.safetensors")
    of_eagle_3 = {"fc.weight": torch.zeros(32, 96), "d2t": torch.zeros(40)}
    torch.save(of_eagle_3, write_public(tmp_path / "pickled", {"model_type": "llama"}, {}) / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled is an EAGLE-3 head .*Nothing is unpickled here"):
        load_drafter(tmp_path / "pickled", target)
    converted = {"fusion_fc.weight": torch.zeros(32, 64)}
    refused({"speculators_model_type": "eagle"}, converted, "head of speculators of type 'eagle'")
    refused({"architectures": ["EagleLlamaForCausalLM"]}, {}, "EAGLE-1/2 head of another program, without model.safete")
