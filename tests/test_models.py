"""Loading of targets: names, directories, hub ids, and the damage that is found in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config

from fsd_infer import Target
from fsd_infer.errors import CheckpointError, FsdError, ModelLoadError, UnknownNameError
from fsd_infer.targets import loading as models


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    directory = tmp_path / "local"
    tiny_llama().save_pretrained(directory)
    return directory


def test_local_directory_without_tokenizer(local_model: Path) -> None:
    model, tokenizer = models.load_target(local_model, device="cpu")
    assert tokenizer is None
    assert model.dtype == torch.bfloat16 and model.device.type == "cpu" and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    model, _ = models.load_target(str(local_model), dtype=torch.float32, device="cpu", attn_implementation="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "name", ["smollm2-135", "no such thing", "./missing", "/missing/too", "gpt2", "", "~nobody/model"]
)
def test_unknown_target_lists_what_would_do(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        models.load_target(name)
    message = str(caught.value)
    assert repr(name) in message and "smollm2-135m" in message
    assert "local model directory" in message and "hub id" in message


def test_close_name_is_suggested() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'smollm2-135m'"):
        models.load_target("smollm2-135")


def test_hub_id_that_cannot_be_loaded_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelLoadError, match="'nobody/no-such-model-here' cannot be loaded"):
        models.load_target("nobody/no-such-model-here")


def test_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no config.json"):
        models.load_target(tmp_path)


def test_directory_without_weights(local_model: Path) -> None:
    (local_model / "model.safetensors").rename(local_model / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="no safetensors weights"):
        models.load_target(local_model)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights_are_named(local_model: Path, keep: int) -> None:
    weights = local_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        models.load_target(local_model)


@pytest.mark.parametrize(
    "index",
    [
        b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"weight_map": 7}', b'{"weight_map": {"a": 7}}',
        b'{"weight_map": {"a": "../model.safetensors"}}', b'{"weight_map": {"a": "/etc/passwd"}}',
        b'{"weight_map": {"a": "pytorch_model.bin"}}',
    ],
)  # fmt: skip
def test_malformed_indexes_are_named(index: bytes, local_model: Path) -> None:
    (local_model / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        models.load_target(local_model, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1e"),
        ({"num_hidden_layers": 0}, "at least one"),
        ({"num_attention_heads": 0}, "cannot be loaded: ZeroDivisionError"),
        ({"hidden_size": "big"}, "cannot be loaded"),
        ({"hidden_size": 10**9}, "config.json asks for"),
        ({"hidden_act": "nope"}, "cannot be loaded"),
        ({"auto_map": 7}, "cannot be loaded"),
        ({"pad_token_id": 10**6}, "cannot be loaded"),
    ],
)
def test_configs_of_no_sense_are_reported(changes: dict[str, object], message: str, local_model: Path) -> None:
    config = json.loads((local_model / "config.json").read_text())
    (local_model / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(FsdError, match=message):
        models.load_target(local_model, device="cpu")


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 5000 + b"}"]
)
def test_configs_that_are_no_objects(config: bytes, local_model: Path) -> None:
    (local_model / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.load_target(local_model, device="cpu")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.load_config(local_model)


@pytest.mark.parametrize("tokenizer", [b"", b"{}", b"\xff", b"[" * 100_000, b'{"model": {"type": "BPE"}}'])
def test_malformed_tokenizers_are_reported(tokenizer: bytes, local_model: Path) -> None:
    (local_model / "tokenizer.json").write_bytes(tokenizer)
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        models.load_target(local_model, device="cpu")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        models.load_tokenizer(local_model)


def test_weights_without_a_place_are_reported(local_model: Path) -> None:
    config = json.loads((local_model / "config.json").read_text())
    (local_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match="9 tensors .* have no place in LlamaForCausalLM, first 'model.layers.1"):
        models.load_target(local_model, device="cpu")


def test_a_model_that_cannot_read_a_token_is_named(local_model: Path) -> None:
    """What a config has wrong and building the model does not show."""
    config = json.loads((local_model / "config.json").read_text())
    (local_model / "config.json").write_text(json.dumps(config | {"sliding_window": "wide"}))
    target = Target.from_pretrained(str(local_model), device="cpu")
    with pytest.raises(ModelLoadError, match="cannot read a token"):
        target.cache_bytes(1, 8)


@pytest.mark.parametrize(
    "device", ["cpu:7", "meta", "abacus", "cuda:99", "xpu", "", "cpu:", "cpu:-1", "\0", "cpu:" + "9" * 30]
)
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(ModelLoadError, match="device"):
        models.parse_device(device)


def test_missing_and_damaged_shards_are_named(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[0].read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is truncated"):
        models.load_target(tmp_path)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is missing"):
        models.load_target(tmp_path)


def test_weights_that_do_not_fill_the_model_are_refused(local_model: Path) -> None:
    config = json.loads((local_model / "config.json").read_text())
    (local_model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"lack 9 tensors .*layers\.2"):
        models.load_target(local_model, device="cpu")


def test_remote_code_is_refused_by_default(local_model: Path) -> None:
    (local_model / "custom.py").write_text("raise RuntimeError('this must never run')\n")
    config = json.loads((local_model / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
    (local_model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        models.load_target(local_model)


def test_encoder_decoder_is_refused(tmp_path: Path, local_model: Path) -> None:
    (local_model / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 8, "vocab_size": 32}))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        models.load_target(local_model)


def test_attention_for() -> None:
    assert models.attention_for(LlamaConfig()) == "sdpa"
    assert models.attention_for(Qwen2Config()) == "sdpa"
    assert models.attention_for(Gemma2Config()) == "eager"
    assert models.attention_for(GptOssConfig()) == "eager"


def test_parse_dtype() -> None:
    assert (
        models.parse_dtype(None) == models.parse_dtype("bf16") == models.parse_dtype("torch.bfloat16") == torch.bfloat16
    )
    assert models.parse_dtype("fp32") == models.parse_dtype(torch.float32) == torch.float32
    with pytest.raises(UnknownNameError, match="unknown dtype 'int4'.*bf16"):
        models.parse_dtype("int4")
