"""LoRA adapters and models in memory as targets: merged as peft merges them, taken as they are, known by digest."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsd_core.errors import CheckpointError, ModelLoadError
from fsd_infer import FsdError, FuzzyDecoder, Target
from fsd_infer.targets.adapters import adapter_names, merge_adapter, read_adapter_config
from fsd_infer.targets.loading import load_target, located
from fsd_train.models.slim import load_slim
from tests.families import reference, tiny_model
from tests.text_toys import save_tiny_chat_target
from tests.train_toys import toy_model


def adapted(model: Any, **options: Any) -> Any:
    """The model with random adapter weights."""
    torch.manual_seed(1)
    made = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": "all-linear", **options}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return made


def save_adapter(directory: Path, model: Any, base: str, **options: Any) -> Path:
    """An adapter of ``model`` with random weights, as peft saves it."""
    made = adapted(model, **options)
    made.peft_config["default"].base_model_name_or_path = base
    made.save_pretrained(directory, save_embedding_layers=False)
    return directory


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return save_adapter(
        tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(base), os.path.relpath(base, tmp_path / "adapter")
    )


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
    (tmp_path / "merged" / "model.safetensors.index.json").write_text("{")  # not read beside a whole file
    slim = load_slim(str(tmp_path / "merged"), torch.bfloat16)
    assert slim is not None and slim.weights_digest() == digests[1]


def rewrite(change: Any, path: Path) -> None:
    save_file({name: change(tensor) for name, tensor in load_file(path).items()}, path)


UNMERGEABLE: list[tuple[type[FsdError], str, Any]] = [  # with a config changed, or weights
    (CheckpointError, "no adapter_model.safetensors", lambda path: path.unlink()),
    (CheckpointError, "truncated", lambda path: path.write_bytes(path.read_bytes()[:-50])),
    (CheckpointError, "holds no tensors", lambda path: save_file({}, path)),
    (CheckpointError, "finite floats", partial(rewrite, torch.Tensor.int)),
    (CheckpointError, "finite floats", partial(rewrite, lambda tensor: tensor * torch.inf)),
    (CheckpointError, "not JSON", lambda path: path.with_name("adapter_config.json").write_text("{")),
    (CheckpointError, "does not name the base model", {"base_model_name_or_path": None}),
    (CheckpointError, "does not fit", {"r": 2}),
    (CheckpointError, "does not fit", {"base_model_name_or_path": "opt"}),
    (CheckpointError, "use_rslora is 'yes'", {"use_rslora": "yes"}),
    (ModelLoadError, "no-such-model.*cannot be loaded", {"base_model_name_or_path": "no-such-model"}),
    (ModelLoadError, "adapter too", {"base_model_name_or_path": "adapter"}),
    (ModelLoadError, "peft_type='LOHA'.*Merge it", {"peft_type": "LOHA"}),
    (ModelLoadError, "PREFIX_TUNING.*Use a LoRA", {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}),
]


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path, adapter: Path) -> None:
    toy_model("opt").save_pretrained(tmp_path / "opt")
    for number, (error, words, change) in enumerate(UNMERGEABLE):
        bad = tmp_path / f"bad{number}"
        shutil.copytree(adapter, bad)
        if isinstance(change, dict):
            base = str(change.get("base_model_name_or_path"))
            here = {"base_model_name_or_path": str(tmp_path / base)} if (tmp_path / base).exists() else {}
            config = json.loads((bad / "adapter_config.json").read_text())
            (bad / "adapter_config.json").write_text(json.dumps({**config, **change, **here}))
        else:
            change(bad / "adapter_model.safetensors")
        with pytest.raises(error, match=words) as caught:
            load_target(bad)
        assert str(bad) in str(caught.value)


# Every field of peft's LoraConfig with a value other than its default. The merged weights are peft's, whatever it says:
COMPUTED: dict[str, Any] = {
    "task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": {"parent_library": "x"}, "peft_version": "0.1",
    "base_model_name_or_path": "other", "revision": "v2", "inference_mode": True, "r": 3, "lora_alpha": 5,
    "lora_dropout": 0.5, "use_rslora": True, "init_lora_weights": "gaussian", "qalora_group_size": 8,
    "target_modules": ["q_proj", "down_proj"], "exclude_modules": ["o_proj"], "layers_to_transform": [1],
    "layers_pattern": "layers", "megatron_core": "other.core", "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0}, "corda_config": {"corda_method": "kpm"}, "lora_ga_config": {"scale": "stable"},
    "runtime_config": {"ephemeral_gpu_offload": True},
}  # fmt: skip
# computed by peft's layers beside the weights, refused by name where the adapter is merged
UNMERGED: dict[str, Any] = {
    "use_dora": True, "fan_in_fan_out": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "lora_bias": True, "use_qalora": True, "use_bdlora": {"nblocks": 2},
}  # fmt: skip
# refused by name everywhere
REFUSED: dict[str, Any] = {
    "init_lora_weights": "pissa_niter_4", "layer_replication": [[0, 1], [0, 2]], "modules_to_save": ["lm_head"],
    "target_parameters": ["mlp.experts.gate_up_proj"], "bias": "all", "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1e-4}, "alora_invocation_tokens": [1], "trainable_token_indices": [1, 2],
    "monteclora_config": {"num_samples": 2}, "ensure_weight_tying": True, "a_field_of_a_later_peft": "x",
    "velora_config": {"num_groups": 2}, "megatron_config": {"hidden_size": 8},
}  # fmt: skip


def test_every_field_of_peft_is_computed_or_refused_by_name(adapter: Path) -> None:
    """A field that a later peft adds must be put into one of the tables."""
    path = adapter / "adapter_config.json"
    written = json.loads(path.read_text())
    ours = {field.name for field in fields(LoraConfig)}
    assert ours - {*COMPUTED, *UNMERGED, *REFUSED} == set()
    for name in ours & COMPUTED.keys():
        path.write_text(json.dumps({**written, name: COMPUTED[name]}))
        assert read_adapter_config(adapter)[name] == COMPUTED[name]
    inits = ["pissa", "PiSSA", "olora", "corda", "loftq", "lora_ga", "mica"]  # which change the base, for all requests
    for name, value in [*(UNMERGED | REFUSED).items(), *(("init_lora_weights", init) for init in inits)]:
        path.write_text(json.dumps({**written, name: value}))
        for unmerged in (False, True):
            if unmerged and name in UNMERGED:
                assert read_adapter_config(adapter, unmerged=True)[name] == value
                continue
            with pytest.raises(ModelLoadError, match=f"{name}="):
                read_adapter_config(adapter, unmerged=unmerged)


SHAPING = ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "layers_to_transform", "exclude_modules")
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "opt")
MERGED: list[tuple[str, dict[str, Any]]] = [
    *((family, {"r": 3, "lora_alpha": 1, "use_rslora": True}) for family in FAMILIES),
    *(("llama", {"init_lora_weights": init}) for init in (True, False, "gaussian", "orthogonal")),
    *(("llama", {"target_modules": ["q_proj", "o_proj", "down_proj"], name: COMPUTED[name]}) for name in SHAPING),
    ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
]


@pytest.mark.parametrize(("family", "options"), MERGED, ids=str)
def test_merged_weights_are_those_of_peft(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    directory = save_adapter(tmp_path, toy_model(family), "anything", **options)
    ours, theirs = toy_model(family), PeftModel.from_pretrained(toy_model(family), directory).merge_and_unload()
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    merge_adapter(ours, directory)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-6, atol=1e-6)
    assert any(not torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_the_base_is_of_the_revision_that_an_adapter_names(base: Path, tmp_path: Path) -> None:
    directory = save_adapter(tmp_path, AutoModelForCausalLM.from_pretrained(base), "owner/base")
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps({**config, "revision": "v2"}))
    assert located(str(directory), {}) == ("owner/base", {"revision": "v2"})
    assert located(str(directory), {"revision": "v1"}) == ("owner/base", {"revision": "v1"})


PROMPT = [5, 9, 11, 7]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_target(tmp_path_factory.mktemp("objects") / "base")


def greedy(decoder: FuzzyDecoder, **options: Any) -> list[int]:
    return decoder.generate([PROMPT], max_new_tokens=16, do_sample=False, **options).sequences[0]


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
    with pytest.raises(ModelLoadError, match="dtype, revision: for loading, but the target is in memory"):
        FuzzyDecoder.from_pretrained(model, "none", dtype=torch.float32, revision="main")


def test_keywords_go_to_transformers(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "repository" / "inner")
    here = str(tmp_path / "repository")
    plain = FuzzyDecoder.from_pretrained(str(base), "none", dtype=torch.float32)
    inner = FuzzyDecoder.from_pretrained(here, "none", dtype=torch.float32, subfolder="inner", local_files_only=True)
    assert inner.tokenizer.get_vocab() == plain.tokenizer.get_vocab() and greedy(inner) == greedy(plain)
    other = AutoTokenizer.from_pretrained(base)
    assert FuzzyDecoder.from_pretrained(str(base), "none", other).tokenizer is other
    wrong = {"no_such_thing": "no_such_thing", "torch_dtype": "give dtype", "use_safetensors": "can run code"}
    for name, words in {**wrong, "config": "pass the object"}.items():
        with pytest.raises(ModelLoadError, match=words):
            FuzzyDecoder.from_pretrained(str(base), "none", **{name: 1})
    for no_model in (torch.nn.Linear(2, 2), plain.target):
        with pytest.raises(ModelLoadError, match=f"is a name or a transformers model, got {type(no_model).__name__}"):
            FuzzyDecoder.from_pretrained(no_model, "none")  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="adapters are directories by name"):
        FuzzyDecoder.from_pretrained(str(base), "none", adapters=[str(base)])  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="a tokenizer is one of transformers"):
        FuzzyDecoder.from_pretrained(str(base), "none", str(base))
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(FsdError, match=r"got LlamaForCausalLM. .*LMDrafter\(Target.of\(model\), target\)"):
        FuzzyDecoder.from_pretrained(str(base), model)  # type: ignore[arg-type]


def test_a_peft_object_decodes_with_its_adapter(base: Path) -> None:
    model = adapted(AutoModelForCausalLM.from_pretrained(base))
    plain = AutoModelForCausalLM.from_pretrained(base)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    decoder = FuzzyDecoder.from_pretrained(model, "lookup")
    expected = model.generate(input_ids=torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)[0, 4:].tolist()
    assert greedy(decoder) == expected != reference(plain, [PROMPT], max_new_tokens=16)[0]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
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
    assert not any("lora" in part for part, _ in Target.from_pretrained(str(directory)).model.named_parameters())
    with pytest.raises(ModelLoadError, match="no adapter 'three': this target has one, two"):
        greedy(decoder, adapter="three")
    with pytest.raises(ModelLoadError, match="adapter x=.*cannot be loaded"):
        FuzzyDecoder.from_pretrained(str(base), "none", adapters={"x": tmp_path / "nowhere"})


def test_copies_of_tables_that_peft_saves_beside_an_adapter_of_them(base: Path, tmp_path: Path) -> None:
    """They may only be copies."""
    theirs, ids = adapted(AutoModelForCausalLM.from_pretrained(base), target_modules=["embed_tokens", "lm_head"]), [[5]]
    theirs.save_pretrained(tmp_path)
    target = FuzzyDecoder.from_pretrained(str(base), "none", adapters={"one": tmp_path}, dtype=torch.float32).target
    with torch.no_grad(), target.adapted("one"):
        torch.testing.assert_close(target.model(torch.tensor(ids)).logits, theirs(torch.tensor(ids)).logits)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tables = {name: tensor + 1 for name, tensor in tensors.items() if name.endswith("base_layer.weight")}
    assert tables
    save_file(tensors | tables, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="differs from the base's"):
        FuzzyDecoder.from_pretrained(str(base), "none", adapters={"one": tmp_path})


def test_an_adapter_of_the_lm_head_is_merged_unless_that_is_the_embeddings_too(base: Path, tmp_path: Path) -> None:
    """Whole weights in the file are refused."""
    ids = torch.tensor([[5, 9, 11]])
    for tied in (False, True):
        model = tiny_model("llama", tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / f"base{tied}")
        theirs = adapted(model, target_modules=["q_proj", "lm_head"])
        theirs.peft_config["default"].base_model_name_or_path = str(tmp_path / f"base{tied}")
        directory = tmp_path / f"adapter{tied}"
        theirs.save_pretrained(directory)  # with a copy of the LM head
        if tied:
            with pytest.raises(ModelLoadError, match="adapts lm_head, whose weight is the embeddings', too"):
                Target.from_pretrained(str(directory))
            target = FuzzyDecoder.from_pretrained(
                str(tmp_path / "baseTrue"), "none", adapters={"one": directory}, dtype=torch.float32
            ).target
        else:
            target = Target.from_pretrained(str(directory), dtype=torch.float32)
        with torch.no_grad(), target.adapted("one") if tied else nullcontext():
            torch.testing.assert_close(target.model(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    file = directory / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.norm.weight": torch.ones(1)}, file)
    with pytest.raises(ModelLoadError, match="has 'base_model.model.model.norm.weight' as a whole"):
        Target.from_pretrained(str(directory))


ODD: list[dict[str, Any]] = [
    {"use_dora": True, "use_rslora": True}, {"target_modules": ["embed_tokens", "q_proj"]},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.0.*v_proj": 3}, "lora_bias": True},
]  # fmt: skip


@pytest.mark.parametrize("options", ODD, ids=lambda options: "+".join(options))
def test_what_peft_computes_beside_the_weights(
    base: Path, tmp_path: Path, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would leave magnitudes of DoRA, and factors that a file lacks, at random values, and report it."""
    directory, ids = save_adapter(tmp_path, AutoModelForCausalLM.from_pretrained(base), str(base), **options), [[5, 9]]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), directory)

    def load() -> Target:
        return FuzzyDecoder.from_pretrained(str(base), "none", adapters={"one": directory}, dtype=torch.float32).target

    capfd.readouterr()
    target = load()
    assert "LOAD REPORT" not in "".join(capfd.readouterr())
    with torch.no_grad(), target.adapted("one"):
        torch.testing.assert_close(target.model(torch.tensor(ids)).logits, theirs(torch.tensor(ids)).logits)
    file = directory / "adapter_model.safetensors"
    first, *others = sorted(load_file(file).items())
    for tensors, word in (others, "lacks"), ([first, *others, (f"{first[0]}x", first[1].clone())], "holds"):
        save_file(dict(tensors), file)
        with pytest.raises(ModelLoadError, match=f"adapter_model.safetensors {word} '"):
            load()
    with pytest.raises(ModelLoadError, match="adapts an embedding|is not a plain LoRA"):
        merge_adapter(toy_model("llama"), directory)
