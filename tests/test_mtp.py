"""MTP layers in targets' own checkpoints: each layout is read, agrees with transformers, and decodes exactly."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_layers import MtpModel

from fsd_core.errors import CheckpointError, ModelLoadError
from fsd_infer import FuzzyDecoder, Target
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.drafters.mtp import MtpDrafter
from fsd_infer.trees.shape import TreeShape
from tests.families import reference, tiny_model, tiny_prompts

WIDTH, VOCAB = 32, 97


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)

COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None, pad_token_id=0,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
MOE: dict[str, Any] = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**MLA, **MOE},
    "glm4_moe": {**MOE, "head_dim": 8},
    "glm4_moe_lite": {**MLA, **MOE},
    "mimo": {},
    "ernie4_5_moe": dict(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1, moe_layer_end_index=1,
        num_experts=4, num_experts_per_tok=2,
    ),
    "longcat_flash": {**MLA, **dict(num_layers=2, n_routed_experts=4, moe_topk=2, expert_ffn_hidden_size=16,
        zero_expert_num=1, ffn_hidden_size=48, head_dim=8)},
}  # fmt: skip


def renamed(family: str, name: str) -> str | None:
    """The MTP tensor that a tensor of the target's own layers becomes; None for others."""
    if family == "longcat_flash":
        found = re.fullmatch(
            r"model\.layers\.0\.(self_attn|input_layernorm|post_attention_layernorm|mlps)\.0\.(.*)", name
        )
        part = found and {"mlps": "transformer_layer.mlp"}.get(found[1], found[1])
        return f"model.mtp.layers.0.{part}.{found[2]}" if found else None
    layer, prefix = {
        "mimo": (1, "model.mtp_layers.0."), "ernie4_5_moe": (0, "model.mtp_block.0."),
    }.get(family, (1, "model.layers.2."))  # fmt: skip
    found = re.fullmatch(rf"model\.layers\.{layer}\.(.*)", name)
    return prefix + found[1] if found else None


OWN = {  # embedding's norm, state's norm, projection, norm after the layer
    "mimo": [
        "model.mtp_layers.0.token_layernorm", "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_proj", "model.mtp_layers.0.final_layernorm",
    ],
    "ernie4_5_moe": [f"model.mtp_{part}.0" for part in ("emb_norm", "hidden_norm", "linear_proj")],
    "longcat_flash": [
        "model.mtp.layers.0.enorm.m", "model.mtp.layers.0.hnorm.m", "model.mtp.layers.0.eh_proj", "model.mtp.norm"
    ],
}  # fmt: skip
DEEPSEEK = [f"model.layers.2.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]


@cache
def checkpoint(family: str, root: Path) -> Path:
    """Write a random target with an MTP layer, in the family's own layout."""
    directory = root / family
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.mul_(4) if parameter.dim() > 1 else parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(directory)
        state = load_file(directory / "model.safetensors")
        extra = {new: value.clone() for name, value in state.items() if (new := renamed(family, name))}
        extra = {n: v + 0.05 * torch.randn_like(v) if v.is_floating_point() else v for n, v in extra.items()}
        for place, name in enumerate(OWN.get(family, DEEPSEEK)):
            extra[name + ".weight"] = torch.randn(WIDTH, 2 * WIDTH) / 4 if place == 2 else 1 + 0.1 * torch.randn(WIDTH)
        if family not in OWN:
            extra["model.layers.2.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            extra["model.layers.2.shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file({**state, **extra}, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


def loaded(family: str, root: Path) -> Target:
    return Target.from_pretrained(str(checkpoint(family, root)), dtype="fp32", device="cpu")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_layer_computes_what_transformers_does(family: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded(family, root)
    model: Any = target.model
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    theirs = MtpModel.from_pretrained(model)
    head = MtpDrafter.of(target).head
    tokens = torch.tensor(tiny_prompts((12,)))
    with torch.no_grad():
        states = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        wanted = theirs.forward_layer(0, states, torch.arange(1, 12)[None], None, input_ids=tokens[:, 1:])
        causal = torch.ones(11, 11, dtype=torch.bool).tril()[None, None]
        made = head(target.embed(tokens[:, 1:]), states, torch.arange(11)[None], causal, None)
    assert torch.allclose(made, wanted, atol=1e-5)


@pytest.mark.filterwarnings("error:.*have no place")
def test_a_checkpoint_with_an_mtp_layer_drafts_by_it_unless_told_otherwise(root: Path) -> None:
    assert load_drafter(None, loaded("glm4_moe", root)).name == "mtp"


def test_what_is_not_read_is_refused_by_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded("glm4_moe", root)
    monkeypatch.setattr(target.config, "model_type", "newer")
    with pytest.raises(ModelLoadError, match="layout of newer"):
        load_drafter("mtp", target)
    assert load_drafter(None, target).name != "mtp"
    with pytest.raises(ModelLoadError, match="no MTP layer"):
        load_drafter("mtp", Target(tiny_model("llama")))
    damaged = loaded("ernie4_5_moe", root)
    state = load_file(checkpoint("ernie4_5_moe", root) / "model.safetensors")
    del state["model.mtp_hidden_norm.0.weight"]
    (root / "damaged").mkdir()
    save_file(state, root / "damaged" / "model.safetensors")
    damaged.model.name_or_path = str(root / "damaged")
    with pytest.raises(CheckpointError, match="does not fit, first at hnorm"):
        load_drafter("mtp", damaged)


@pytest.mark.parametrize("shape", [TreeShape.chain(3), TreeShape(3, 3, 8)], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_generate(family: str, shape: TreeShape, root: Path) -> None:
    target = loaded(family, root)
    decoder = FuzzyDecoder(target, MtpDrafter.of(target, shape))
    prompts = tiny_prompts()
    made = decoder.generate(prompts, max_new_tokens=16, do_sample=False)
    assert made.sequences == reference(target.model, prompts, max_new_tokens=16)
