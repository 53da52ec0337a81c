"""LoRA adapters as targets: merged as peft merges them, named wherever a target is, known by digest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.errors import CheckpointError, FsdError, ModelLoadError
from fsd_infer.targets.adapters import is_adapter, merge_adapter
from fsd_infer.targets.loading import load_target, resolve_target
from fsd_infer.targets.target import Target
from fsd_train.models.slim import load_slim
from tests.text_toys import save_tiny_chat_target
from tests.train_toys import toy_model


def save_adapter(directory: Path, model: Any, base: str, **options: Any) -> Path:
    """An adapter of ``model`` with random weights, as peft saves it."""
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **options}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_chat_target(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return save_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), "../base")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "opt"])
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"r": 3, "lora_alpha": 1}], ids=["plain", "rslora", "odd"]
)
def test_merged_weights_are_those_of_peft(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    directory = save_adapter(tmp_path, toy_model(family), "anything", **options)
    ours, theirs = toy_model(family), PeftModel.from_pretrained(toy_model(family), directory).merge_and_unload()
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    merge_adapter(ours, directory)
    changed = 0
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-6, atol=1e-6)
        changed += not torch.equal(value, before[name])
    assert changed > 6


def test_an_adapter_is_a_target_like_any_other(tmp_path: Path, base: Path, adapter: Path) -> None:
    assert is_adapter(adapter) and not is_adapter(base)
    assert Path(resolve_target(str(adapter))).samefile(base)  # for whoever wants config or tokenizer alone
    target, plain = (Target.from_pretrained(str(path), dtype=torch.float32) for path in (adapter, base))
    assert target.name == str(adapter) and target.tokenizer.get_vocab() == plain.tokenizer.get_vocab()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    ids = torch.tensor([[5, 9, 11, 7]])
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        assert float((target.model(ids).logits - plain.model(ids).logits).abs().max()) > 0.1
    # by name in the decoder, merged, so that no adapter layers run
    decoder = FuzzyDecoder.from_pretrained(str(adapter), "none", dtype=torch.float32)
    made = decoder.generate([ids[0].tolist()], max_new_tokens=8, do_sample=False, chat=False)
    greedy = theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert made.sequences[0] == greedy[0, 4:].tolist()
    assert not any("lora" in name for name, _ in decoder.target.model.named_parameters())


def test_bf16_sums_are_formed_in_fp32_and_rounded_once(base: Path, adapter: Path) -> None:
    model, _ = load_target(adapter, dtype="bf16")
    again, _ = load_target(adapter, dtype="bf16")
    exact, _ = load_target(base, dtype="bf16")
    merge_adapter(exact.float(), adapter)
    for name, value in model.named_parameters():
        assert value.dtype == torch.bfloat16 and torch.equal(value, again.get_parameter(name))
        assert torch.equal(value, exact.get_parameter(name).to(torch.bfloat16))


def test_the_digest_tells_adapted_targets_apart(tmp_path: Path, base: Path, adapter: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 13}))
    digests = [Target.from_pretrained(str(path)).weights_digest() for path in (base, adapter, other)]
    assert len(set(digests)) == 3
    assert digests[1] == Target.from_pretrained(str(adapter), dtype=torch.float32).weights_digest()
    slim = load_slim(str(adapter), torch.bfloat16)
    assert slim is not None and slim.weights_digest() == digests[1]
    # a merged copy on disk is still that target
    Target.from_pretrained(str(adapter), dtype=torch.bfloat16).model.save_pretrained(tmp_path / "merged")
    assert Target.from_pretrained(str(tmp_path / "merged")).weights_digest() == digests[1]


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path, adapter: Path) -> None:
    toy_model("opt").save_pretrained(tmp_path / "opt")
    bad = tmp_path / "bad"

    def refused(error: type[FsdError], words: str, **changes: Any) -> None:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(adapter, bad)
        config = json.loads((bad / "adapter_config.json").read_text())
        (bad / "adapter_config.json").write_text(json.dumps({**config, **changes.get("config", {})}))
        if "weights" in changes:
            changes["weights"](bad / "adapter_model.safetensors")
        if "text" in changes:
            (bad / "adapter_config.json").write_text(changes["text"])
        with pytest.raises(error, match=words) as caught:
            load_target(bad)
        assert str(bad) in str(caught.value)

    refused(CheckpointError, "no adapter_model.safetensors", weights=lambda path: path.unlink())
    refused(CheckpointError, "truncated", weights=lambda path: path.write_bytes(path.read_bytes()[:-50]))
    refused(CheckpointError, "not JSON", text="{")
    refused(CheckpointError, "does not name the base model", config={"base_model_name_or_path": None})
    refused(CheckpointError, "does not fit", config={"r": 2})
    refused(CheckpointError, "does not fit", config={"base_model_name_or_path": str(tmp_path / "opt")})
    refused(ModelLoadError, "no-such-model.*cannot be loaded", config={"base_model_name_or_path": "no-such-model"})
    refused(ModelLoadError, "adapter too", config={"base_model_name_or_path": str(adapter)})
    refused(ModelLoadError, "peft_type='LOHA'", config={"peft_type": "LOHA"})
    refused(ModelLoadError, "use_dora=True", config={"use_dora": True})
    refused(ModelLoadError, "rank_pattern", config={"rank_pattern": {"q_proj": 2}})
