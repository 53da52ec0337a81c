"""Loading of targets: names, directories, hub ids, and the damage that is found in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, Qwen2Config

from fsd_infer import Target
from fsd_infer.errors import CheckpointError, FsdError, ModelLoadError, UnknownNameError
from fsd_infer.targets import loading as models
from tests.train_toys import toy_model


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    directory = tmp_path / "local"
    toy_model().save_pretrained(directory)
    return directory


def test_local_directory_without_tokenizer(local_model: Path) -> None:
    model, tokenizer = models.load_target(local_model, device="cpu")
    assert tokenizer is None
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu" and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    model, _ = models.load_target(str(local_model), dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"


def test_hub_id_that_cannot_be_loaded_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelLoadError, match="'nobody/no-such-model-here' cannot be loaded"):
        models.load_target("nobody/no-such-model-here")


@pytest.mark.parametrize(
    "device", ["cpu:7", "meta", "abacus", "cuda:99", "xpu", "", "cpu:", "cpu:-1", "\0", "cpu:" + "9" * 30]
)
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(ModelLoadError, match="device"):
        models.parse_device(device)


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    toy_model().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[0].read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is truncated"):
        models.load_target(tmp_path)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is missing"):
        models.load_target(tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135", "no such thing", "./missing", "gpt2", "", "~nobody/model"])
def test_unknown_target_lists_what_would_do(name: str) -> None:
    with pytest.raises(UnknownNameError, match="local model directory") as caught:
        models.load_target(name)
    message = str(caught.value)
    assert repr(name) in message and "hub id" in message
    assert ("Did you mean 'smollm2-135m'" if name == "smollm2-135" else "smollm2-135m") in message


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def cut(keep: int) -> Callable[[Path], object]:
    def apply(directory: Path) -> None:
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:keep])

    return apply


def config(**changes: object) -> Callable[[Path], object]:
    def apply(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


DEEP = b"[" * 100_000
REMOTE = {"model_type": "homemade", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
DAMAGE: list[tuple[Callable[[Path], object], type[FsdError], str]] = [
    (lambda directory: (directory / "config.json").unlink(), ModelLoadError, "has no config.json"),
    (lambda directory: (directory / "model.safetensors").unlink(), ModelLoadError, "no safetensors weights"),
    *((cut(keep), CheckpointError, r"model\.safetensors is truncated") for keep in (0, 5, 200, -1)),
    *(
        (write("model.safetensors.index.json", content), CheckpointError, r"index\.json")
        for content in (
            b"\xff", DEEP, b"[]", b"{}", b'{"weight_map": 7}', b'{"weight_map": {"a": 7}}',
            b'{"weight_map": {"a": "../model.safetensors"}}', b'{"weight_map": {"a": "pytorch_model.bin"}}',
        )
    ),
    *(
        (write("config.json", content), CheckpointError, r"config\.json")
        for content in (b"", b"[]", b"7", b"\xff", DEEP, b'{"hidden_size": ' + b"9" * 5000 + b"}")
    ),
    *(
        (write("tokenizer.json", content), ModelLoadError, "cannot be loaded")
        for content in (b"", b"{}", b"\xff", DEEP, b'{"model": {"type": "BPE"}}')
    ),
    (config(num_hidden_layers=10**9), FsdError, "num_hidden_layers is 1e"),
    (config(text_config={"num_hidden_layers": 10**9}), FsdError, "num_hidden_layers is 1e"),
    (config(num_hidden_layers=0), FsdError, "at least one"),
    (config(num_hidden_layers=3), ModelLoadError, r"lack 9 tensors .*layers\.2"),
    (config(vocab_size=7), ModelLoadError, r"has the shape \[.*, but LlamaForCausalLM needs \[7, "),
    (config(num_attention_heads=0), FsdError, "cannot be loaded: ZeroDivisionError"),
    (config(hidden_size="big"), FsdError, "cannot be loaded"),
    (config(hidden_size=10**9), FsdError, "config.json asks for"),
    (config(auto_map=7), FsdError, "cannot be loaded"),
    (config(pad_token_id=10**6), FsdError, "cannot be loaded"),
    (config(model_type="t5"), ModelLoadError, "cannot be loaded|lack"),
    (config(**REMOTE), ModelLoadError, "trust_remote_code"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "error", "words"), DAMAGE)
def test_damage_is_named(
    damage: Callable[[Path], object], error: type[FsdError], words: str, local_model: Path
) -> None:
    (local_model / "custom.py").write_text("raise SystemExit('this must never run')\n")
    damage(local_model)
    with pytest.raises(error, match=words):
        models.load_target(local_model, device="cpu")


def test_what_a_config_has_wrong_and_building_the_model_does_not_show(local_model: Path) -> None:
    config(sliding_window="wide")(local_model)
    with pytest.raises(ModelLoadError, match="cannot read a token"):
        Target.from_pretrained(str(local_model), device="cpu").cache_bytes(1, 8)
    config(sliding_window=None, num_hidden_layers=1)(local_model)
    with pytest.warns(UserWarning, match="9 tensors .* have no place in LlamaForCausalLM, first 'model.layers.1"):
        models.load_target(local_model, device="cpu")


def test_attention_and_types() -> None:
    for made, attention in ((LlamaConfig(), "sdpa"), (Qwen2Config(), "sdpa"), (Gemma2Config(), "eager")):
        assert models.attention_for(made) == attention
    assert models.attention_for(GptOssConfig()) == "eager"
    assert models.parse_dtype(None) == models.parse_dtype("torch.bfloat16") == models.parse_dtype("bf16")
    assert models.parse_dtype("fp32") == models.parse_dtype(torch.float32) == torch.float32
    with pytest.raises(UnknownNameError, match="unknown dtype 'int4'.*bf16"):
        models.parse_dtype("int4")
