"""Random targets with MTP layers in their own checkpoints, and what the layers estimate: no cache, no trees."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fsd_infer import Target
from fsd_infer.drafters.mtp import read_layers
from tests.families import RECURRENT
from tests.published_blocks import Estimate, Layout, States
from tests.rules_toy import V

WIDTH = 16
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)

COMMON: dict[str, Any] = dict(
    vocab_size=V, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4
)
MOE: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
    first_k_dense_replace=1,
)  # fmt: skip
SLIDING: dict[str, Any] = dict(sliding_window=3, layer_types=["full_attention", "sliding_attention"], head_dim=8)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**MLA, **MOE},
    "glm4_moe": {**MOE, "head_dim": 8},
    "glm4_moe_lite": {**MLA, **MOE},
    "hy_v3": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    "mimo": {},
    "ernie4_5_moe": dict(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1, moe_layer_end_index=1,
        num_experts=4, num_experts_per_tok=2,
    ),
    "longcat_flash": {**MLA, **dict(num_layers=2, n_routed_experts=4, moe_topk=2, expert_ffn_hidden_size=16,
        zero_expert_num=1, ffn_hidden_size=48, head_dim=8)},
    **{family: RECURRENT[family] for family in QWEN},
    "mimo_v2_flash": {**MOE, **SLIDING, "v_head_dim": 4},
    "mellum": {**SLIDING, **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)},
    "exaone4": SLIDING,
    "exaone_moe": {**MOE, **SLIDING, "n_routed_experts": 4, "num_experts": 4},
    "nemotron_h": RECURRENT["nemotron_h"],
}  # fmt: skip
SPARSE: dict[str, dict[str, Any]] = dict.fromkeys(
    ("deepseek_v32", "glm_moe_dsa"), {**MLA, **MOE, "index_head_dim": 16, "index_n_heads": 16, "index_topk": 4}
)
OWN = {  # embedding's norm, state's norm, projection, norm after the layer; {k} is the layer's number
    "mimo": [
        f"model.mtp_layers.{{k}}.{part}" for part in
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    ],
    "ernie4_5_moe": [f"model.mtp_{part}.{{k}}" for part in ("emb_norm", "hidden_norm", "linear_proj")],
    "longcat_flash": [
        "model.mtp.layers.{k}.enorm.m", "model.mtp.layers.{k}.hnorm.m", "model.mtp.layers.{k}.eh_proj",
        "model.mtp.norm",
    ],
    "mimo_v2_flash": [f"model.mtp.layers.{{k}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")],
    "nemotron_h": [f"mtp.layers.{part}" for part in ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm")],
    **{family: [f"mtp.{part}" for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")]
       for family in (*QWEN, "mellum", "exaone4", "exaone_moe")},
}  # fmt: skip
DEEPSEEK = [f"model.layers.{{k}}.{part}" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
OWN["hy_v3"] = [*DEEPSEEK[:3], "model.layers.{k}.final_layernorm"]
FOLLOWS = {*FAMILIES, *SPARSE} - (OWN.keys() - {"hy_v3"})  # whose numbers go on from the target's own layers


def renamed(family: str, name: str, number: int) -> str | None:
    """The MTP tensor that a tensor of the target's own layers becomes; None for others."""
    if family == "longcat_flash":
        found = re.fullmatch(
            r"model\.layers\.0\.(self_attn|input_layernorm|post_attention_layernorm|mlps)\.0\.(.*)", name
        )
        part = found and {"mlps": "transformer_layer.mlp"}.get(found[1], found[1])
        return f"model.mtp.layers.{number}.{part}.{found[2]}" if found else None
    if family == "nemotron_h":  # an attention and a block of experts
        found = re.fullmatch(r"(?:model|backbone)\.layers\.([13])\.(.*)", name)
        return f"mtp.layers.{int(found[1]) // 2}.{found[2]}" if found else None
    if family in ("mimo_v2_flash", "exaone_moe"):  # the attention of a layer with a window, and a dense MLP
        found = re.fullmatch(r"model\.layers\.(?:1\.((?!mlp).*)|0\.(mlp.*))", name)
        part = found and (found[1] or found[2])
        if family == "exaone_moe":
            return f"mtp.layers.{number}.{part}" if found else None
        return f"model.mtp.layers.{number}.{part.replace('post_attention', 'pre_mlp')}" if part else None
    layer, prefix = {
        "mimo": (1, f"model.mtp_layers.{number}."), "ernie4_5_moe": (0, f"model.mtp_block.{number}."),
        **dict.fromkeys((*QWEN, "mellum", "exaone4"), (1, f"mtp.layers.{number}.")),
    }.get(family, (1, f"model.layers.{number}."))  # fmt: skip
    found = re.fullmatch(rf"model\.layers\.{layer}\.(.*)", name)
    return prefix + found[1] if found else None


def mtp_tensors(family: str, state: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Random MTP layers beside a target's tensors, in the family's own layout."""
    made: dict[str, Tensor] = {}
    for number in range(2, 2 + count) if family in FOLLOWS else range(count):
        found = {new: value.clone() for name, value in state.items() if (new := renamed(family, name, number))}
        made |= {n: v + 0.05 * torch.randn_like(v) if v.is_floating_point() else v for n, v in found.items()}
        for place, name in enumerate(OWN.get(family, DEEPSEEK)):
            value = torch.randn(WIDTH, 2 * WIDTH) / 4 if place == 2 else 1 + 0.1 * torch.randn(WIDTH)
            made.setdefault(f"{name}.weight".format(k=number), value)
        if family not in OWN:
            made[f"model.layers.{number}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
            made[f"model.layers.{number}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    return made


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def checkpoint(family: str, count: int = 1, vocabulary: int = V) -> Path:
    """Write a random target with MTP layers."""
    directory = Path(_root().name) / f"{family}-{count}-{vocabulary}"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**COMMON, **(FAMILIES | SPARSE)[family], "vocab_size": vocabulary})
        if hasattr(config, "num_nextn_predict_layers"):
            config.num_nextn_predict_layers = count
        model: Any = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.mul_(4) if parameter.dim() > 1 else parameter.data.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(directory)
        state = load_file(directory / "model.safetensors")
        state |= mtp_tensors(family, state, count)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


@cache
def mtp_target(family: str, count: int = 1) -> Target:
    return Target.from_pretrained(str(checkpoint(family, count)), dtype="fp32", device="cpu")


def estimate_of(family: str, count: int = 1) -> Estimate:
    """What a family's layers estimate."""

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        target = mtp_target(family, count)
        layers, rotary = _layers(family, count), getattr(target.decoder, "rotary_emb", None)
        kind = ["sliding_attention"] if family in ("mimo_v2_flash", "mellum") else []  # of the rotary angles
        window = 3 if family in WINDOWED else 1 << 20

        def run(index: int, tokens: list[int], given: Tensor) -> Tensor:
            embeds, places = target.embed(torch.tensor([tokens])), torch.arange(len(tokens))[None]
            causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril().triu(1 - window)[None, None]
            angles: dict[str, Any] = {"position_ids": places}
            if rotary is not None:
                angles["position_embeddings"] = rotary(embeds, places, *kind)
            made: Tensor = layers[index](embeds, given[None], causal, None, **angles)[0]
            return made

        known, whole = states.final, [*text, *drafts]
        for place in range(len(drafts) + 1):
            if count == 1:  # the layer's own outputs follow the target's states
                out = run(0, whole[1 : len(text) + place], known)
                known = torch.cat([known, out[-1:]])
            else:  # a layer a step, over the window of the text
                known = out = run(place, whole[place + 1 : place + len(text)], known)
        return states.lm_head(out[-1])

    return estimate


def _mtp(family: str, count: int = 1) -> Layout:
    depth = 8 if count == 1 else count
    return Layout({}, {}, estimate_of(family, count), depth, target=lambda: mtp_target(family, count))


@cache
def _layers(family: str, count: int) -> Any:
    return read_layers(mtp_target(family, count)).layers


WINDOWED = ("mimo_v2_flash", "mellum", "exaone4", "exaone_moe")
MTP: dict[str, Callable[[], Layout]] = {
    **{f"mtp of {family}": lambda family=family: _mtp(family) for family in FAMILIES},
    "mtp of deepseek_v3, two layers": lambda: _mtp("deepseek_v3", 2),
    "mtp of mimo, three layers": lambda: _mtp("mimo", 3),
}


def single_experts(state: dict[str, Tensor]) -> None:
    """Experts as published checkpoints hold them, one by one."""
    for name in [name for name in state if name.endswith("experts.gate_up_proj")]:
        base = name.removesuffix("gate_up_proj")
        for expert, (both, down) in enumerate(zip(state.pop(name), state.pop(f"{base}down_proj"))):
            for part, value in zip(("gate", "up", "down"), (*both.chunk(2), down)):
                state[f"{base}{expert}.{part}_proj.weight"] = value.clone()


def outputs_of(*heads: Any, width: int) -> list[Tensor]:
    """What MTP layers make of the same random embeddings and states."""
    embeds, states = torch.randn(2, 1, 6, width).unbind(0)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        return [head(embeds, states, torch.arange(6)[None], causal) for head in heads]


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
