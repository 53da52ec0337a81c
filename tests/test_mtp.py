"""MTP layers in targets' own checkpoints: as transformers computes them, and what is damaged or unknown is named.

tests/test_published_heads.py has what they share with other heads: trees, answers, distributions, recordings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

from fsd_core.errors import CheckpointError, FsdError, ModelLoadError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.mtp import MtpDrafter, read_layers
from fsd_infer.engine import Request, decode
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.mtp import find_mtp
from fsd_infer.rules import parse_rule
from fsd_infer.trees.shape import TreeShape
from tests.families import altered, tiny_model
from tests.published_blocks import States
from tests.published_mtp import MTP, SPARSE, change_config, checkpoint, estimate_of, mtp_target, single_experts
from tests.rules_toy import V
from tests.test_published_heads import PROMPTS, drafted, plain_of

State = dict[str, Tensor]


def changed(target: Target, source: Path, root: Path, change: Callable[[State], Any], **config: Any) -> Target:
    """The target with the files of a checkpoint after a change."""
    made = Target(target.model, name=target.name)
    made.model.name_or_path = str(altered(source, root, config, change))
    return made


@pytest.fixture
def glm() -> Any:
    source = checkpoint("glm4_moe")
    yield mtp_target("glm4_moe"), source
    mtp_target("glm4_moe").model.name_or_path = str(source)


@pytest.mark.parametrize(
    ("family", "count"), [("deepseek_v3", 1), ("deepseek_v3", 3), ("glm4_moe", 1), ("glm4_moe", 3), ("mellum", 1)]
)
def test_layers_compute_and_draft_what_transformers_does(family: str, count: int, monkeypatch: Any) -> None:
    """transformers drafts a token by each layer."""
    target = mtp_target(family, count)
    model: Any = target.model
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"^mtp\.", r"model\.layers\.[234]\..*"])
    theirs = MtpModel.from_pretrained(model)
    text = PROMPTS[0]
    tokens, places = torch.tensor([text]), torch.arange(1, len(text))[None]
    with torch.no_grad():
        states = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        ids, logits, _ = theirs(tokens[:, 1:], states, None, places, None)
    tree = drafted(load_drafter("mtp", target, TreeShape.chain(6 if count > 1 else 1)), [text])
    assert tree.tokens[0, 1:].tolist() == ids[0].tolist() and len(ids[0]) == count
    torch.testing.assert_close(tree.q_logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", SPARSE)
def test_layers_with_sparse_attention_draft_for_targets_that_have_it(family: str) -> None:
    """Which reads no more than four tokens, chosen among those that a tree's mask shows."""
    target = mtp_target(family)
    drafter = load_drafter(None, target, TreeShape(depth=3, width=3, nodes=10))
    assert drafter.name == "mtp"
    made = decode(target, drafter, parse_rule("exact"), Request(PROMPTS, 8, True))
    assert made.sequences == plain_of(target, 8)
    tree, states = drafted(drafter, PROMPTS[:1], pieces=1), States.of(target.model, PROMPTS[0])
    for node in (tree.q_index[0] >= 0).nonzero()[:, 0].tolist():
        path = tree.tokens[0, tree.ancestors[0, node].nonzero()[1:, 0]].tolist()
        with torch.no_grad():
            wanted = estimate_of(family)(states, PROMPTS[0], path)
        torch.testing.assert_close(tree.q_logits[0, tree.q_index[0, node]], wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_of_exaone_without_a_window_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike the target's own: the order of the tokens before changes what it computes for the last."""
    target = mtp_target("exaone_moe")
    monkeypatch.setattr(target.config, "mtp_layer_types", ["full_attention"], raising=False)
    embeds, states = torch.randn(2, 1, 6, target.hidden_size).unbind(0)
    places, causal = torch.arange(6)[None], torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    layers, order = read_layers(target), [3, 0, 4, 1, 2, 5]
    with torch.no_grad():
        last, other = (layers(embeds[:, i], states[:, i], places, causal)[0, -1] for i in (range(6), order))
        assert not torch.allclose(last, other, atol=1e-4)
        layers.layers[0].block.self_attn.is_sliding, layers.layers[0].block.self_attn.sliding_window = False, 3
        last, other = (layers(embeds[:, i], states[:, i], places, causal)[0, -1] for i in (range(6), order))
    torch.testing.assert_close(last, other)


def test_a_checkpoint_with_an_mtp_layer_drafts_by_it_unless_told_otherwise() -> None:
    assert load_drafter(None, mtp_target("glm4_moe")).name == "mtp"
    with pytest.raises(ModelLoadError, match="no MTP layer"):
        load_drafter("mtp", Target(tiny_model("llama")))


Q, EXPERT, HEAD = (f"model.layers.2.{name}.weight" for name in (
    "self_attn.q_proj", "mlp.experts.3.up_proj", "shared_head.head"
))  # fmt: skip


def without(name: str) -> Callable[[State], Any]:
    def change(state: State) -> None:
        single_experts(state)
        del state[name]

    return change


def with_value(**values: Callable[[Tensor], Tensor]) -> Callable[[State], Any]:
    """Tensors by the end of their names; "+name" is a further one."""

    def change(state: State) -> None:
        for end, made in values.items():
            state[f"{Q.rpartition('.')[0]}.{end}"] = made(state[Q])

    return change


def fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def four_bits(state: State) -> None:
    state[Q.replace("weight", "qweight")] = state.pop(Q).int()


FAULTS: dict[str, tuple[Callable[[State], Any], str, dict[str, Any]]] = {
    "no norm": (without("model.layers.2.hnorm.weight"), r"lacks the tensor model.layers.2.hnorm.weight", {}),
    "no second layer": (lambda state: None, r"lacks the tensor model.layers.3.self_attn.q_proj.weight", {"layers": 2}),
    "another shape": (with_value(weight=lambda x: x[:-8]), rf"{Q} has the shape \[24, 16\], but .* \[32, 16\]", {}),
    "whole numbers": (with_value(weight=lambda x: x.to(torch.int8)), rf"quantised \({Q} of type I8\)", {}),
    "four bits": (four_bits, rf"quantised \({Q.replace('weight', 'qweight')} of type I32\)", {}),
    "fp8 without scales": (with_value(weight=fp8), f"F8_E4M3 without {Q}_scale_inv", {}),
    "other scales": (
        with_value(weight=fp8, weight_scale_inv=lambda x: torch.ones(3, 1)), r"_scale_inv has the shape \[3, 1\]", {}
    ),
    "an unknown tensor": (with_value(lora=torch.clone), "q_proj.lora has no place in an MTP layer of glm4_moe", {}),
    "names of another layout": (
        lambda state: state.update({"mtp.fc.weight": torch.zeros(16, 32)}), "mtp.fc.weight has no place", {}
    ),
    "another vocabulary": (
        lambda state: state.update({HEAD: torch.zeros(V + 1, 16)}), rf"head.weight has the shape \[{V + 1}, 16\]", {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_tensor_and_file(
    glm: Any, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change, words, config = FAULTS[fault]
    target = changed(*glm, tmp_path, change)
    if config:
        monkeypatch.setattr(target.config, "num_nextn_predict_layers", config["layers"])
    with pytest.raises(ModelLoadError, match=rf"(?s){tmp_path}/model.safetensors: .*{words}") as caught:
        load_drafter("mtp", target)
    assert "\n" not in str(caught.value)
    if "vocabulary" not in fault:  # only values tell
        assert load_drafter(None, target).name != "mtp" and str(caught.value) in caplog.text


def test_unknown_layouts_and_indexes_of_absent_files_are_named(glm: Any, tmp_path: Path, monkeypatch: Any) -> None:
    target = changed(*glm, tmp_path, lambda state: None)
    index = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "model-1.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    index["model.layers.2.hnorm.weight"] = "model-2.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(FsdError, match="model-2.safetensors"):
        load_drafter("mtp", target)
    assert load_drafter(None, target).name != "mtp"
    monkeypatch.setattr(target.config, "model_type", "newer")
    target.model.name_or_path = str(glm[1])
    with pytest.raises(ModelLoadError, match="layout of newer"):
        load_drafter("mtp", target)


def test_published_forms_of_the_same_values_are_read(glm: Any, tmp_path: Path) -> None:
    """Single experts, no copies of the target's tables, other types, and fp8 in blocks or rows of one scale."""
    wanted = MtpDrafter.of(glm[0]).head.state_dict()

    def change(state: State) -> None:
        single_experts(state)
        del state[HEAD], state["model.layers.2.embed_tokens.weight"]
        for place, name in enumerate(sorted(name for name in state if name.startswith("model.layers.2."))):
            state[name] = state[name].to([torch.float64, torch.float16, torch.bfloat16][place % 3])
        for name in ("rotary_emb.inv_freq", "k_scale", "q_proj.input_scale"):  # which change nothing here
            state[Q.replace("q_proj.weight", name)] = torch.ones(1)

    made = MtpDrafter.of(changed(*glm, tmp_path, change)).head.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(made[name], value, rtol=0.01, atol=0.01)
        assert made[name].dtype == torch.float32

    down, experts = "model.layers.2.mlp.experts.2.down_proj.weight", torch.rand(2, 2) + 0.5
    rows, whole = torch.rand(32, 1) + 0.5, torch.tensor(0.25)

    def narrow(state: State) -> None:
        single_experts(state)
        state[down], state[down + "_scale_inv"] = fp8(state[down]), experts
        state[Q], state[Q + "_scale"] = fp8(state[Q]), rows
        k = Q.replace("q_proj", "k_proj")
        state[k], state[k + "_scale"] = fp8(state[k]), whole

    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 12]}}
    layer = read_layers(changed(*glm, tmp_path, narrow, **blocks)).layers[0].state_dict()
    state = load_file(tmp_path / "model.safetensors")
    scales = torch.tensor([[experts[i // 8, j // 12] for j in range(16)] for i in range(16)])
    assert torch.equal(layer["block.mlp.experts.down_proj"][2], state[down].float() * scales)
    assert torch.equal(layer["block.self_attn.q_proj.weight"], state[Q].float() * rows)
    assert torch.equal(layer["block.self_attn.k_proj.weight"], state[Q.replace("q_proj", "k_proj")].float() / 4)


def test_a_layer_with_tables_of_its_own_drafts_by_them(glm: Any, tmp_path: Path, caplog: Any) -> None:
    other = torch.randn(V, 16)
    embeds = "model.layers.2.embed_tokens.weight"
    own = changed(*glm, tmp_path, lambda state: state.update({HEAD: other, embeds: state[embeds].flip(0)}))
    drafter = MtpDrafter.of(own, TreeShape.chain(3))
    assert f"drafts by {HEAD}, which is not a copy" in caplog.text and f"drafts by {embeds}" in caplog.text
    head = drafter.head
    text = torch.tensor(PROMPTS[:1])
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        states = own.features(text)[:, :-1]
        wanted = head(own.embed(V - 1 - text[:, 1:]), states, torch.arange(6)[None], causal, None)[:, -1] @ other.T
    torch.testing.assert_close(drafted(drafter, PROMPTS[:1]).q_logits[:, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mtp of deepseek_v3, two layers", "mtp of mimo, three layers"])
def test_a_layer_begins_at_its_position_whatever_siblings_stand_before(name: str) -> None:
    """In a short text, nodes of a depth fill the slots where a later layer has no pairs, and those after them."""
    made = MTP[name]()
    drafter = load_drafter("mtp", made.target(), TreeShape(depth=3, width=4, nodes=21))
    for text in ([3, 1], [2, 0, 3]):
        tree, states = drafted(drafter, [text], pieces=1), States.of(made.target().model, text)
        depths = []
        for node in (tree.q_index[0] >= 0).nonzero()[:, 0].tolist():
            path = tree.tokens[0, tree.ancestors[0, node].nonzero()[1:, 0]].tolist()
            with torch.no_grad():
                wanted = made.estimate(states, text, path)
            torch.testing.assert_close(tree.q_logits[0, tree.q_index[0, node]], wanted, rtol=1e-5, atol=1e-5)
            depths.append(len(path))
        assert max(depths) == made.depth - 1


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "mimo_v2_flash", "qwen3_next", "nemotron_h"])
def test_layers_alone_in_a_directory_draft_for_their_target(family: str, tmp_path: Path, caplog: Any) -> None:
    """Named with and without what stands before the layers in the target; no target is loaded from there."""
    target, source = mtp_target(family), checkpoint(family)
    wanted = MtpDrafter.of(target).head.state_dict()
    found = find_mtp(target)
    state = load_file(source / "model.safetensors")
    state = {name: state[name] for name in found.names}
    for place, prefix in (("with", ""), ("without", "model.")):
        directory = tmp_path / place
        directory.mkdir()
        named = {name.removeprefix(prefix): value for name, value in state.items()}
        save_file(named | {"lm_head.weight": torch.zeros(V, 16)}, directory / "model.safetensors")
        shutil.copy(source / "config.json", directory)
        made = load_drafter(str(directory), target)
        assert isinstance(made, MtpDrafter) and made.head.layers[0].state_first is (family == "mimo")
        assert made.head.state_dict().keys() == wanted.keys()
        assert all(torch.equal(made.head.state_dict()[name], value) for name, value in wanted.items())
        with pytest.raises(CheckpointError, match=rf"{directory} holds the MTP layers of a model alone.*--drafter"):
            Target.from_pretrained(str(directory))
    if family == "glm4_moe":  # as SGLang's script writes it
        directory = tmp_path / "nextn"
        directory.mkdir()
        save_file({name.replace("layers.2.", "layers.0."): state[name] for name in state}, directory / "0.safetensors")
        index = {"weight_map": {name.replace("layers.2.", "layers.0."): "0.safetensors" for name in state}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(source / "config.json", directory)
        change_config(directory, num_hidden_layers=1, architectures=["Glm4MoeForCausalLMNextN"])
        made = load_drafter(str(directory), target)
        assert all(torch.equal(made.head.state_dict()[name], value) for name, value in wanted.items())
        with pytest.raises(CheckpointError, match=rf"{directory} holds the MTP layers of a model alone"):
            Target.from_pretrained(str(directory))
        with pytest.raises(CheckpointError, match="is a head of kind mtp, not EAGLE"):
            EagleHead.from_pretrained(directory, target)
    whole = tmp_path / "whole"
    unnamed = {name.removeprefix("model."): value for name, value in state.items()}
    made = load_drafter(
        "mtp", changed(target, source, whole, lambda old: [old.pop(n) for n in found.names] + [old.update(unnamed)])
    )
    target.model.name_or_path = str(source)
    assert all(torch.equal(made.head.state_dict()[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("family", "why"), [("mimo_v2_flash", "1 is read in mimo_v2"), ("glm4_moe", "its config says 1")]
)
def test_layers_that_are_not_read_are_left_out_aloud(family: str, why: str, monkeypatch: Any, caplog: Any) -> None:
    target = mtp_target(family, 3)
    if family == "glm4_moe":
        monkeypatch.setattr(target.config, "num_nextn_predict_layers", 1)
    found = find_mtp(target)
    assert found is not None and found.count == 1 and f"has 3 MTP layers in its files, and {why}" in caplog.text


def test_other_blocks_of_nemotron_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    target = mtp_target("nemotron_h")
    monkeypatch.setattr(target.config, "mtp_layers_block_type", ["linear_attention", "moe"])
    with pytest.raises(ModelLoadError, match=r"blocks \['linear_attention', 'moe'\]"):
        load_drafter("mtp", target)


# in a target of fp8 ---------------------------------------------------------------------------------------------------


BLOCK = 8


def narrowed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in fp8, and a scale for each block of 8 rows and columns."""
    blocks = weight.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 3)) / 448
    return (weight / spread(scales)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@pytest.mark.parametrize("family", ["glm4_moe", "mimo", "qwen3_5_text"])
def test_an_fp8_target_drafts_by_its_fp8_layer(tmp_path: Path, family: str) -> None:
    source, places = checkpoint(family), [tmp_path / "narrow", tmp_path / "wide"]
    state = load_file(source / "model.safetensors")
    single_experts(state)
    wide = dict(state)
    for name in [name for name in state if name.endswith("_proj.weight") and "eh_proj" not in name]:
        state[name], state[f"{name}_scale_inv"] = narrowed(state[name])
        wide[name] = state[name].float() * spread(state[f"{name}_scale_inv"])
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    for place, tensors, config in zip(places, (state, wide), ({"quantization_config": quantised}, {})):
        altered(source, place, config, lambda old, new=tensors: (old.clear(), old.update(new)))
    narrow, expanded = (Target.from_pretrained(str(place), dtype="fp32", device="cpu") for place in places)
    drafters = [load_drafter("mtp", target, TreeShape(3, 3, 10)) for target in (narrow, expanded)]
    trees = [drafted(drafter, PROMPTS) for drafter in drafters]
    torch.testing.assert_close(trees[0].q_logits, trees[1].q_logits, rtol=1e-5, atol=1e-5)
    answers = FuzzyDecoder(narrow, drafters[0]).generate(PROMPTS, max_new_tokens=12, do_sample=False)
    assert answers.sequences == plain_of(expanded, 12)
