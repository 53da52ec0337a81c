"""Quantised targets: equal to the plain loop in fp32, packed around, trained for, or refused.

A kind is tested where its library is installed; torchao is among the tested versions.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig

from fsd_core.errors import CheckpointError, ModelLoadError
from fsd_infer import FuzzyDecoder, Target, TreeShape
from fsd_infer.backends.cpu.packing import packed_of
from fsd_infer.backends.cpu.stack import CpuStack
from fsd_infer.drafters import EagleDrafter, LMDrafter, NoDrafter
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.targets.gptq import expand, load_expanded
from fsd_infer.targets.loading import load_config, load_target
from fsd_infer.targets.precision import check_quantization, method_of, precision_of
from fsd_infer.targets.weights import is_plain, weight_rows
from fsd_train.cli import main as fsd_train
from fsd_train.models.start import initialise_from
from tests.families import altered, reference, save_head, tiny_model
from tests.gguf_toys import FITTING
from tests.kernel_toys import CPU, needs_kernels, prepare, restore
from tests.loopback_hub import loopback_hub
from tests.quantised_checkpoints import AT_LOAD, STORED, load, packed, write
from tests.test_adapters import save_adapter
from tests.train_toys import TRAINER, eagle_module, fit_command, toy_target

NEEDED = {
    "torchao": "torchao", "bitsandbytes": "bitsandbytes", "quanto": "optimum.quanto",
    "compressed-tensors": "compressed_tensors",
}  # fmt: skip
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, head_dim=16)
TORCHAO = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
KINDS = [kind for kind in (*AT_LOAD, *STORED) if kind != "plain"]


def need(kind: str) -> None:
    pytest.importorskip(NEEDED.get(kind.split()[0], "torch"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quantised") / "plain"
    tiny_model("llama", **SIZES).save_pretrained(directory)
    return directory


def drafted(target: Target, **sizes: Any) -> LMDrafter:
    """A drafter that is often, not always, right: the model that was quantised."""
    return LMDrafter(Target(tiny_model("llama", **(sizes or SIZES)).to(target.dtype)), target, TreeShape(4, 2, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_drafting_changes_no_token(kind: str, plain: Path, tmp_path: Path) -> None:
    """The engine's tree and plain loop agree with transformers' `generate`, also on a model that is handed over."""
    need(kind)
    target = load(str(plain), kind, torch.float32, tmp_path)
    prompts = [[5, 9, 11, 7, 3], [8, 2]]
    expected = reference(target.model, prompts, max_new_tokens=8)
    for made, names in ((target, ("none", "lookup+recycle")), (Target.of(target.model), ())):
        decoder = FuzzyDecoder(made, drafted(made))
        for drafter in (None, *map(decoder.load_drafter, names)):
            options = {"max_new_tokens": 8, "do_sample": False, "drafter": drafter}
            assert decoder.generate(prompts, **options).sequences == expected
    assert made.precision.startswith(kind.split()[0])
    whole = Target.from_pretrained(str(plain), dtype=torch.float32)
    assert made.weights_digest() != whole.weights_digest() and made.fingerprint()["precision"] == made.precision
    torch.testing.assert_close(made.lm_head_rows(None)[0], whole.lm_head_rows(None)[0])
    assert (made.vocab_size, made.hidden_size) == (whole.vocab_size, whole.hidden_size)


IN_BLOCKS = {  # a kind's block on a CPU
    "torchao int8": 8, "torchao int4": 2, "quanto int8": 8, "compressed-tensors W8A16": 8,
    "compressed-tensors W4A16": 2, "gptq int4": 2, "gptq int4 with zeros": 3, "gptq int8": 8, "awq int4": 3,
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_packing_takes_plain_layers_and_blocks(kind: str, tmp_path: Path) -> None:
    """Whole numbers with a scale per group become blocks of the kernels; other kinds compute by their library."""
    need(kind)
    sizes: dict[str, Any] = {**FITTING, "head_dim": 64, "scale": 1.0}
    tiny_model("llama", **sizes).save_pretrained(tmp_path / "plain")
    target = load(str(tmp_path / "plain"), kind, torch.bfloat16, tmp_path)
    prompt = [[5, 9, 11, 7, 3]]
    ids = torch.randint(3, 200, (1, 40))
    before, logits = reference(target.model, prompt, max_new_tokens=4), target.features(ids).float()
    layers = [part for part in target.decoder.modules() if isinstance(part, nn.Linear)]
    prepare(target, release=True)
    assert packed_of(target.model.lm_head) is not None
    packed = {weight.ggml_type for weight in map(packed_of, layers) if weight is not None}
    if CPU.describe() is None or kind not in IN_BLOCKS:
        assert not packed and target.stack is target.plain_stack
        made = FuzzyDecoder(target, drafted(target, **sizes)).generate(prompt, max_new_tokens=4, do_sample=False)
        assert made.sequences == before
        return
    assert packed == {IN_BLOCKS[kind]} and isinstance(target.stack, CpuStack)
    assert all(layer.weight.is_meta for layer in layers), "the library's weights are freed"
    assert float((target.features(ids).float() - logits).norm()) < 0.02 * float(logits.norm())
    plain, made = (
        FuzzyDecoder(target, drafter).generate(prompt, max_new_tokens=24, do_sample=False).sequences
        for drafter in (NoDrafter(target.vocab_size), drafted(target, **sizes))
    )
    assert plain == made, "exact decoding of the packed model is its own plain loop"
    restore(target)
    assert float((target.features(ids).float() - logits).norm()) < 0.02 * float(logits.norm())


def test_a_quantised_lm_head_is_read_through_its_layer(plain: Path) -> None:
    """torchao's, of embeddings and LM head too: rows are what the layer computes with, read once."""
    need("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig(), include_input_output_embeddings=True)
    target = Target.from_pretrained(str(plain), dtype=torch.float32, quantization_config=config)
    head, table = target.model.get_output_embeddings(), target.model.get_input_embeddings()
    assert not is_plain(head)
    ids = torch.tensor([7, 3])
    torch.testing.assert_close(target.lm_head_rows(ids)[0], head.weight.dequantize()[ids])
    torch.testing.assert_close(weight_rows(table, ids), table(ids))
    assert weight_rows(head, None) is weight_rows(head, None)
    eagle = EagleHead(EagleConfig.for_target(target, draft_vocab_size=32))
    eagle.draft_ids.copy_(torch.arange(32))
    initialise_from(eagle, target)
    decoder = FuzzyDecoder(target, EagleDrafter(eagle.eval().requires_grad_(False), target, TreeShape(3, 2, 6)))
    made = decoder.generate([[40, 41, 3]], max_new_tokens=16, do_sample=False)
    assert made.sequences == reference(target.model, [[40, 41, 3]], max_new_tokens=16)


def test_the_fingerprint_tells_what_a_head_was_trained_for(plain: Path, tmp_path: Path) -> None:
    need("torchao")
    whole = Target.from_pretrained(str(plain), dtype=torch.float32)
    head = EagleHead(EagleConfig.for_target(whole))
    save_head(tmp_path / "head", head, whole.fingerprint())
    quantised = Target.from_pretrained(str(plain), dtype=torch.float32, quantization_config=TORCHAO)
    with pytest.warns(UserWarning, match="trained for unquantised weights, and .* has torchao Int8WeightOnlyConfig"):
        drafter = EagleDrafter.from_pretrained(tmp_path / "head", quantised)
    assert drafter.describe()["trained_for"] == "unquantised weights"
    save_head(tmp_path / "own", head, quantised.fingerprint())
    assert "trained_for" not in EagleDrafter.from_pretrained(tmp_path / "own", quantised).describe()


def test_a_head_is_trained_for_a_quantised_target(toys: Path, tmp_path: Path) -> None:
    """In the step and on cached features, which another precision's run refuses; doctor says what the change costs."""
    need("torchao")
    target, answers = str(toys / "target"), str(toys / "answers.jsonl")
    export = {"class_path": "fsd_train.callbacks.ExportHead", "init_args": {"directory": str(tmp_path / "head")}}
    trainer = {"max_steps": 2, "limit_val_batches": 1, "callbacks": [export]}
    model: dict[str, Any] = {"target": target, "target_kwargs": {"quantization_config": TORCHAO}, "lr": 1e-3}
    data = {"train_files": [answers], "validation_fraction": 0.1, "batch_tokens": 256}
    assert fsd_train(fit_command(tmp_path / "a", trainer, model, data)) == 0
    facts = json.loads((tmp_path / "head" / "config.json").read_text())
    assert facts["target"]["precision"] == "torchao Int8WeightOnlyConfig"
    assert facts["training"]["hyperparameters"]["target_kwargs"] == model["target_kwargs"]
    line = ["cache-features", "--target", target, "--data", answers, "--output", str(tmp_path / "features")]
    assert fsd_train([*line, "--target-kwargs", json.dumps(model["target_kwargs"])]) == 0
    cached = {**data, "features": str(tmp_path / "features")}
    assert fsd_train(fit_command(tmp_path / "b", {"max_steps": 1}, model, cached)) == 0
    assert fsd_train(fit_command(tmp_path / "c", {"max_steps": 1}, {**model, "target_kwargs": {}}, cached)) == 2
    report = tmp_path / "found.json"
    line = ["doctor", "--target", target, "--data", answers, "--rows", "4", "--json", str(report)]
    for head, kwargs, says in (
        (tmp_path / "head", model["target_kwargs"], "trained for torchao Int8WeightOnlyConfig"),
        (tmp_path / "head", {}, "trained for torchao Int8WeightOnlyConfig, used with unquantised weights"),
    ):
        fsd_train([*line, "--head", str(head), "--target-kwargs", json.dumps(kwargs), "--trained-on", target])
        found = {one["check"]: one for one in json.loads(report.read_text())}
        assert found["precision"]["says"] == says and "in brackets with" in found["what it costs"]["says"]


@pytest.mark.parametrize("kwargs", [{}, {"quantization_config": {"quant_method": "fp8"}}], ids=str)
def test_training_quantises_a_target_on_its_own_device(
    kwargs: dict[str, Any], toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such weights cannot be moved, and most kinds need a GPU; others are moved later, or sharded."""
    module, places = eagle_module(toys, target_kwargs=kwargs), list[torch.device]()
    monkeypatch.setattr(module, "whole_target", lambda dtype, place: places.append(torch.device(place)) or toy_target())
    trainer: Any = Trainer(**{**TRAINER, "default_root_dir": tmp_path})
    trainer.strategy._root_device = torch.device("cuda", 1)
    module.trainer = trainer
    module._load_target()
    assert places == [torch.device("cuda", 1) if kwargs else torch.device("cpu")]


def test_what_a_cpu_cannot_compute_is_refused_by_name(plain: Path) -> None:
    for config, words in (
        ({"quant_method": "eetq", "weights": "int8"}, "'eetq' need a GPU"),
        ({"quant_method": "fp8"}, "by 'fp8' on a GPU only"),
        ({"quant_method": "torchao", "quant_type": "Int4WeightOnlyConfig"}, "IntxWeightOnlyConfig"),
        ({"quant_method": "awq", "bits": 4}, "by 'awq' on a GPU only"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            Target.from_pretrained(str(plain), device="cpu", quantization_config=config)
    for config in ({"quant_method": "gptq", "bits": 3}, {"quant_method": "awq", "bits": 4, "version": "gemv"}):
        with pytest.raises(ModelLoadError, match="a CPU cannot read: use GPTQ with 4 or 8 bits"):
            check_quantization(config, torch.device("cpu"))
    check_quantization({"quant_method": "mxfp4"}, torch.device("cpu"), stored=True)  # expanded
    check_quantization({"quant_method": "eetq"}, torch.device("cuda"))


def test_files_beside_the_models_own_are_not_read(plain: Path, tmp_path: Path) -> None:
    """transformers reads model.safetensors, else the shards of the index; others are left over from something else."""
    target, ids = load(str(plain), "gptq int4", torch.float32, tmp_path), torch.tensor([[5, 9, 11]])
    directory = tmp_path / "gptq-int4"
    state = load_file(directory / "model.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in state.items()}, directory / "older.safetensors")
    again = load_target(str(directory), dtype=torch.float32, device="cpu")[0]
    torch.testing.assert_close(again(ids).logits, target.model(ids).logits, rtol=0, atol=0)


GPTQ_4 = STORED["gptq int4"][1]


def with_fp8(end: str) -> Any:
    """Its MLPs in fp8 with one scale each, by names that end so."""

    def change(state: dict[str, Any]) -> None:
        for name in [name for name in state if ".mlp." in name]:
            scale = state[name].abs().max() / 448
            state |= {name: (state[name] / scale).to(torch.float8_e4m3fn), f"{name}{end}": scale}

    return change


UNREAD: dict[str, tuple[str, Any, Any, str]] = {  # stored kind, change of tensors, config, words
    "GPTQ without a config": ("gptq int4", (), None, "has not read their 'model.layers.0.mlp.down_proj.g_idx'"),
    "Model-Optimizer": ("", with_fp8("_scale"), {"quant_method": "modelopt"}, "'modelopt', which transformers"),
    "fp8 without a config": ("", with_fp8("_scale"), None, "has not read their .*weight_scale'"),
    "fp8 without scales": ("", with_fp8("_"), {"quant_method": "fp8"}, "down_proj.weight is of type F8_E4M3 without"),
    "zeros of GPTQ's second format": (
        "gptq int4", lambda state: [value.add_(0x11111111) for name, value in state.items() if "qzeros" in name],
        GPTQ_4, 'their zeros are 9, not 8: set checkpoint_format in its quantization_config to "gptq_v2"',
    ),
    "no method, as of MLX": ("", (), {"bits": 4, "group_size": 64}, "quantised by None, .* quant_method, as of MLX"),
    "a method alone": ("", (), "fp8", "quantization_config is 'fp8', not an object"),
    "no library": ("", (), {"quant_method": "hqq", "nbits": 4}, r"HQQ version .*\. Install it; fsd-toolkit\[quant\]"),
    "two widths": ("gptq int4", (), GPTQ_4 | {"dynamic": {"+:.*up.*": {"bits": 8}}}, "other bits than 4 in some"),
    "no zeros": ("awq int4", lambda state: state.pop("model.layers.0.mlp.up_proj.qzeros"), STORED["awq int4"][1],
                 "parts of model.layers.0.mlp.up_proj are missing .*no qzeros"),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNREAD)
def test_numbers_of_quantised_weights_are_never_taken_for_the_weights(fault: str, plain: Path, tmp_path: Path) -> None:
    kind, tensors, config, words = UNREAD[fault]
    source = write(load_target(str(plain), dtype=torch.float32)[0], tmp_path / "source", kind) if kind else plain
    directory = altered(source, tmp_path / "made", {"quantization_config": config}, tensors)
    with pytest.raises((ModelLoadError, CheckpointError), match=words):
        load_target(str(directory), device="cpu")


def test_layers_packed_by_gptqmodel_are_read(repo_root: Path) -> None:
    """With and without zeros and order of activations; groups stay for the kernels where inputs are neighbours."""
    golden = json.loads((repo_root / "tests" / "golden" / "gptq-awq.json").read_text(encoding="utf-8"))
    cases = {name: case for name, case in golden.items() if isinstance(case, dict)}
    for name, case in cases.items():
        facts = {"quant_method": name.split()[0], "bits": case.pop("bits")}
        weight = torch.tensor(case.pop("weight"))
        state = {f"layer.{part}": torch.tensor(value) for part, value in case.items()}
        state = {key: value if value.is_floating_point() else value.int() for key, value in state.items()}
        damaged = {key: value for key, value in state.items() if not key.endswith("qzeros")}
        groups = expand(state, facts, torch.float32, "golden")
        assert list(state) == ["layer.weight"] and list(groups) == ([] if name == "gptq act order" else ["layer"])
        torch.testing.assert_close(state["layer.weight"][:4], weight, atol=2e-4, rtol=1e-3)
        with pytest.raises(CheckpointError, match="parts of layer are missing or do not fit"):
            expand(damaged, facts, torch.float32, "golden")
    assert len(cases) == 4


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("size", [-1, 16, 32, 64, 80, 96, 128])
def test_groups_of_any_size_are_expanded(method: str, size: int) -> None:
    """96 inputs in groups of any size: 64 and 80 leave a shorter last group, and 128 one group."""
    inputs, outputs = 96, 16
    width = inputs if size == -1 else size
    group = torch.arange(inputs) // width
    torch.manual_seed(0)
    codes, count = torch.randint(0, 16, (inputs, outputs)), int(group.max()) + 1
    zeros, scales = torch.randint(1, 16, (count, outputs)), torch.rand(count, outputs) + 0.5
    right = ((codes - zeros[group]) * scales[group]).t()
    if method == "gptq":
        made = {"qweight": packed(codes, 4), "qzeros": packed((zeros - 1).t(), 4).t(), "scales": scales}
    else:
        order = torch.arange(outputs).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
        made = {name: packed(each[:, order].t(), 4).t() for name, each in (("qweight", codes), ("qzeros", zeros))}
        made["scales"] = scales
    facts: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": size}

    def state(**more: Any) -> dict[str, Any]:
        return {f"layer.{part}": tensor for part, tensor in {**made, **more}.items()}

    found = state()
    kept = expand(found, facts, torch.float32, "made", lost := Counter())
    torch.testing.assert_close(found["layer.weight"], right)
    ragged = inputs % width > 0 and width < inputs
    assert [why.split(",")[0] for why in lost] == (["with groups of several sizes"] if ragged else [])
    assert list(kept) == ([] if ragged else ["layer"])
    if method == "gptq":
        expand(found := state(), {**facts, "checkpoint_format": "GPTQ"}, torch.float32, "made")
        torch.testing.assert_close(found["layer.weight"], right)
        other = torch.randperm(inputs)  # inputs in another order
        found = state(g_idx=group[other].int(), qweight=packed(codes[other], 4))
        expand(found, facts, torch.float32, "made", lost := Counter())
        torch.testing.assert_close(found["layer.weight"], right[:, other])
        assert list(lost) == ([] if count == 1 else ["with groups in the order of activations (desc_act)"])
        for wrong in (group - 1, group + 1, group[:-1]):
            with pytest.raises(CheckpointError, match="parts of layer"):
                expand(state(g_idx=wrong.int()), facts, torch.float32, "made")
    for wrong in (8, 0, "32", None if inputs % width and count > 1 else 24):
        with pytest.raises(CheckpointError, match="parts of layer") if wrong is not None else nullcontext():
            expand(state(), {**facts, "group_size": wrong}, torch.float32, "made")
    found = state(g_idx=group.int())
    expand(found, {**facts, "group_size": 8, "dynamic": {"+:layer": {"group_size": size}}}, torch.float32, "made")
    torch.testing.assert_close(found["layer.weight"], right)


def test_a_checkpoint_of_gptq_comes_from_the_hub(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_target(str(plain), dtype=torch.float32, device="cpu")[0]
    directory = write(model, tmp_path / "gptq", "gptq int4")
    GenerationConfig(eos_token_id=[5, 7]).save_pretrained(directory)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    with loopback_hub() as hub:
        hub.add("owner/gptq", directory)
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        config = load_config("owner/gptq")
        made, info = load_expanded("owner/gptq", config, {"revision": "main", "trust_remote_code": False}, **options)
    local = load_target(str(directory), **options, device="cpu")[0]
    assert not info["missing_keys"] and made.generation_config.eos_token_id == [5, 7]
    for name, weight in local.state_dict().items():
        assert torch.equal(weight, made.state_dict()[name])


def test_adapters_that_only_peft_computes_stay_beside_quantised_weights(plain: Path, tmp_path: Path) -> None:
    """Given as directory like given by name; they are refused, before weights are read, where they would be merged."""
    model = load_target(str(plain), dtype=torch.float32, device="cpu")[0]
    base = write(model, tmp_path / "gptq", "gptq int4")
    adapter = save_adapter(
        tmp_path / "adapter", model, str(base), rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3}
    )
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    whole = FuzzyDecoder.from_pretrained(str(adapter), "none", **like)
    named = FuzzyDecoder.from_pretrained(str(base), "none", adapters={"one": adapter}, **like)
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    right = named.generate([[5, 9, 11]], adapter="one", **asked).sequences
    assert whole.generate([[5, 9, 11]], **asked).sequences == right
    assert named.generate([[5, 9, 11]], **asked).sequences != right
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(plain)}))
    with pytest.raises(ModelLoadError, match="not a plain LoRA adapter .*rank_pattern="):
        load_target(str(adapter), **like)


def test_a_precision_has_a_short_name() -> None:
    assert method_of(None) is method_of({}) is None and method_of({"load_in_4bit": True}) == "bitsandbytes"
    model = tiny_model("llama")
    for config, words in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
        (STORED["compressed-tensors W4A16"][1], "compressed-tensors W4A16"),
        (STORED["compressed-tensors FP8"][1], "compressed-tensors FP8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq int4"),
    ):
        model.config.quantization_config = config
        assert precision_of(model) == words
