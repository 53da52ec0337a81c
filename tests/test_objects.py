"""Models in memory are taken as they are; what else is given goes to transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.cli.main import main as fsd_infer
from fsd_infer.cpu.packing import can_pack, packed_in
from fsd_infer.errors import ModelLoadError
from fsd_infer.targets.adapters import adapter_names
from tests.families import reference
from tests.test_adapters import save_adapter
from tests.text_toys import save_tiny_chat_target

PROMPT = [5, 9, 11, 7]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_target(tmp_path_factory.mktemp("objects") / "base")


def greedy(decoder: FuzzyDecoder, **options: Any) -> list[int]:
    return decoder.generate([PROMPT], max_new_tokens=16, do_sample=False, chat=False, **options).sequences[0]


def test_a_model_in_memory_is_left_as_it_is(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base).train()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model.lm_head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [parameter.requires_grad for parameter in model.parameters()]
    decoder = FuzzyDecoder.from_pretrained(model, "lookup", tokenizer)
    assert decoder.target.model is model and not model.training
    made = decoder.generate("a prompt", max_new_tokens=12, do_sample=False)
    assert made.texts[0] == tokenizer.decode(made.sequences[0], skip_special_tokens=True)
    assert greedy(decoder) == reference(model, [PROMPT], max_new_tokens=16)[0]
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(part) for part in model.modules())
    with pytest.raises(FsdError, match="no tokenizer"):
        FuzzyDecoder.from_pretrained(model, "none").generate("text")
    with pytest.raises(ModelLoadError, match="dtype, revision: for loading, but the target is in memory"):
        FuzzyDecoder.from_pretrained(model, "none", dtype=torch.float32, revision="main")


@pytest.mark.skipif(not can_pack(), reason="needs bf16 products by oneDNN")
def test_it_is_packed_if_that_is_asked_for_and_keeps_its_weights(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    plain = greedy(FuzzyDecoder.from_pretrained(model, "none"))
    assert not packed_in(model)
    decoder = FuzzyDecoder.from_pretrained(model, "lookup", pack=True)
    assert packed_in(model) and not any(parameter.is_meta for parameter in model.parameters())
    assert greedy(decoder) == plain


def test_keywords_go_to_transformers(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "repository" / "inner")
    here = str(tmp_path / "repository")
    plain = FuzzyDecoder.from_pretrained(str(base), "none", dtype=torch.float32)
    inner = FuzzyDecoder.from_pretrained(here, "none", dtype=torch.float32, subfolder="inner", local_files_only=True)
    assert inner.tokenizer.get_vocab() == plain.tokenizer.get_vocab() and greedy(inner) == greedy(plain)
    other = AutoTokenizer.from_pretrained(base)
    assert FuzzyDecoder.from_pretrained(str(base), "none", other).tokenizer is other
    for name, words in (
        ("no_such_thing", "no_such_thing"),
        ("torch_dtype", "give dtype"),
        ("use_safetensors", "can run code"),
        ("config", "pass the object"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            FuzzyDecoder.from_pretrained(str(base), "none", **{name: 1})
    with pytest.raises(ModelLoadError, match="a target is a name or a transformers model, got Linear"):
        FuzzyDecoder.from_pretrained(torch.nn.Linear(2, 2), "none")  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="a tokenizer is one of transformers"):
        FuzzyDecoder.from_pretrained(str(base), "none", str(base))


def test_the_command_line_takes_them_too(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(base, tmp_path / "inner")
    line = ["generate", "--target", str(tmp_path), "--drafter", "none", "--prompt", "a", "--max-new-tokens", "4"]
    assert fsd_infer([*line, "--target-kwargs", '{"subfolder": "inner"}']) == 0
    assert fsd_infer(line) == 2 and "no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fsd_infer([*line, "--target-kwargs", "[]"])
    assert "needs a JSON object" in capsys.readouterr().err


def lora(model: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    made = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return made


def test_a_peft_object_decodes_with_its_adapter(base: Path) -> None:
    adapted = lora(AutoModelForCausalLM.from_pretrained(base))
    plain = AutoModelForCausalLM.from_pretrained(base)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    decoder = FuzzyDecoder.from_pretrained(adapted, "lookup")
    expected = adapted.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[0, 4:].tolist()
    assert greedy(decoder) == expected != reference(plain, [PROMPT], max_new_tokens=16)[0]
    assert [name for name, parameter in adapted.named_parameters() if parameter.requires_grad] == trained
    digest = decoder.target.weights_digest()
    assert greedy(decoder, adapter="none") == reference(plain, [PROMPT], max_new_tokens=16)[0]
    assert greedy(decoder) == expected and decoder.target.weights_digest() == digest
    assert digest != FuzzyDecoder.from_pretrained(plain, "none").target.weights_digest()
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ModelLoadError, match="PROMPT_TUNING"):
        FuzzyDecoder.from_pretrained(get_peft_model(AutoModelForCausalLM.from_pretrained(base), prompts), "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_request_may_name_an_adapter(base: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The answers are those of the merged targets, and the base's in between."""
    directories = {}
    for name, seed in (("one", 1), ("two", 2)):
        model = AutoModelForCausalLM.from_pretrained(base)
        directories[name] = save_adapter(tmp_path / name, model, str(base), r=4 + seed)
    decoder = FuzzyDecoder.from_pretrained(
        str(base), "lookup+recycle", dtype=dtype, adapters=directories, prefix_cache_bytes=2**20
    )
    assert adapter_names(decoder.target.model) == ["one", "two"]
    wanted: dict[str | None, list[int]] = {None: greedy(FuzzyDecoder.from_pretrained(str(base), "none", dtype=dtype))}
    for name, directory in directories.items():
        wanted[name] = greedy(FuzzyDecoder.from_pretrained(str(directory), "none", dtype=dtype))
    for name in (None, "one", "two", None, "two", "none"):
        if dtype == torch.float32 or name in (None, "none"):
            assert greedy(decoder, adapter=name) == wanted[None if name == "none" else name]
        else:  # merged weights are rounded once more
            assert greedy(decoder, adapter=name) != wanted[None]
    with pytest.raises(ModelLoadError, match="no adapter 'three': this target has one, two"):
        greedy(decoder, adapter="three")
    with pytest.raises(ModelLoadError, match="adapter x=.*cannot be loaded"):
        FuzzyDecoder.from_pretrained(str(base), "none", adapters={"x": tmp_path / "nowhere"})
