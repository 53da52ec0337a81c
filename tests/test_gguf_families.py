"""GGUF files of the architectures that are read here, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map

from benchmarks.write_gguf import finish, interleave_rope
from fsd_infer.targets.gguf_families import FAMILIES
from fsd_infer.targets.loading import load_target
from tests.families import tiny_model
from tests.gguf_toys import CONTROL, KINDS, MERGES, TOKENS

WINDOW = 8
SHORT = {"sliding_window": WINDOW}
SHORT_KEY = {"attention.sliding_window": WINDOW}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA_3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
YARN_KEYS = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.125, 1.25, 1.5, 2.0, 3.0], "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
}  # fmt: skip
LONG_KEYS = {
    "attention.sliding_window": 0, "rope.dimension_count": 12, "rope.scaling.original_context_length": 32,
    "rope.scaling.attn_factor": (1 + 3 / 5) ** 0.5,  # of 256 / 32 positions
}  # fmt: skip
MINISTRAL = {**YARN, "truncate": True, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
MINISTRAL["original_max_position_embeddings"] = 32
UNSCALED = {"rope_type": "default", "llama_4_scaling_beta": 0.0}
SCALES = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
SCALE_KEYS = {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0}
MIXED = ["sliding_attention", "full_attention", "full_attention"]

CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [  # architecture, model type, its config, further keys
    ("gemma", "gemma", dict(head_dim=8), {}),
    ("gemma2", "gemma2", dict(head_dim=8, query_pre_attn_scalar=8, **SHORT), SHORT_KEY | {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    ("gemma2", "gemma2", dict(head_dim=16, num_hidden_layers=46, query_pre_attn_scalar=8, **SHORT), SHORT_KEY),
    ("gemma3", "gemma3_text", dict(
        head_dim=8, num_hidden_layers=7, query_pre_attn_scalar=8, rope_parameters=GEMMA_3, **SHORT
    ), SHORT_KEY | {"rope.scaling.factor": 8.0, "rope.scaling.type": "linear"}),
    ("phi3", "phi3", SHORT, SHORT_KEY | {"rope.scaling.original_context_length": 256}),
    ("phi3", "phi3", dict(hidden_size=64, sliding_window=None, rope_parameters=LONG,
                          original_max_position_embeddings=32), LONG_KEYS),
    ("qwen2moe", "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48}, EXPERT_KEYS | {
        "expert_shared_feed_forward_length": 48}),
    ("qwen3moe", "qwen3_moe", dict(head_dim=8, norm_topk_prob=True, **EXPERTS), EXPERT_KEYS),
    ("qwen3moe", "qwen3_moe", dict(head_dim=8, norm_topk_prob=False, **EXPERTS), EXPERT_KEYS | {
        "expert_weights_norm": False, "expert_gating_func": 1}),
    ("llama", "mixtral", LOCAL | {"sliding_window": None}, {"expert_count": 4, "expert_used_count": 2}),
    ("gpt-oss", "gpt_oss", dict(head_dim=8, rope_parameters=YARN, **LOCAL, **SHORT), EXPERT_KEYS | SHORT_KEY | {
        "expert_feed_forward_length": 64, **{f"rope.{key}": value for key, value in YARN_KEYS.items()}}),
    ("smollm3", "smollm3", dict(num_hidden_layers=5), {}),
    ("mistral3", "ministral3", dict(rope_parameters=MINISTRAL), {
        "attention.temperature_scale": 0.5, "rope.scaling.yarn_log_multiplier": 1.0,
        **{f"rope.{key}": value for key, value in YARN_KEYS.items()}, "rope.scaling.original_context_length": 32}),
    ("mistral3", "ministral3", dict(rope_parameters=MINISTRAL | UNSCALED), {}),
    ("granite", "granite", SCALES, SCALE_KEYS),
    ("arcee", "arcee", dict(head_dim=8), {}),
    ("llama", "llama", dict(attention_bias=True, mlp_bias=True), {}),
    ("olmo2", "olmo2", {}, {}),
    ("olmo2", "olmo3", dict(num_hidden_layers=3, layer_types=MIXED, **SHORT), SHORT_KEY | {
        "attention.sliding_window_pattern": [True, False, False]}),
    ("exaone4", "exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 2), {}),
    ("exaone4", "exaone4", dict(num_hidden_layers=5, **SHORT), SHORT_KEY),
    ("seed_oss", "seed_oss", dict(head_dim=16, attention_bias=True, attention_out_bias=False), {}),
    ("glm4", "glm4", dict(head_dim=8, attention_bias=True), {"rope.dimension_count": 4}),
    ("ernie4_5", "ernie4_5", dict(head_dim=8), {}),
    ("hunyuan-dense", "hunyuan_v1_dense", dict(head_dim=8), {}),
    ("starcoder2", "starcoder2", {}, {}),
    ("command-r", "cohere", dict(logit_scale=0.25), {"logit_scale": 0.25, "rope.scaling.type": "none"}),
    ("cohere2", "cohere2", dict(logit_scale=0.25, num_hidden_layers=5, **SHORT), SHORT_KEY | {"logit_scale": 0.25}),
    ("qwen2vl", "qwen2", dict(use_sliding_window=False), {"rope.dimension_sections": [1, 1, 2, 0]}),
    ("qwen3vl", "qwen3", dict(use_sliding_window=False, head_dim=8), {
        "n_deepstack_layers": 3, "rope.dimension_sections": [1, 1, 2, 0]}),
]  # fmt: skip
assert {case[0] for case in CASES} | {"qwen2", "qwen3"} == FAMILIES.keys()


def model_of(family: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = tiny_model(family, vocab_size=len(TOKENS), **{"rms_norm_eps": 1e-5, **options})
    for parameter in model.parameters():
        flat = torch.rand_like(parameter) * 0.5 + (0.1 if family.startswith("gemma") else 0.75)
        parameter.data = (
            flat if parameter.dim() < 2 else torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5
        )
    return model


def keys_of(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norms = [name for name in ("norm_epsilon", "layer_norm_eps") if hasattr(config, name)]
    kind, name = ("layer_norm_epsilon", norms[0]) if norms else ("layer_norm_rms_epsilon", "rms_norm_eps")
    return {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width, "attention.value_length": width, "vocab_size": config.vocab_size,
        "rope.freq_base": float(rope["rope_theta"]), f"attention.{kind}": getattr(config, name),
    }  # fmt: skip


def tensors_of(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    config, family = model.config, FAMILIES[architecture]
    named = {name: known for known, name in MODEL_ARCH_NAMES.items()}[architecture]
    names, found = get_tensor_name_map(named, config.num_hidden_layers), {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    turned = config.model_type == "gpt_oss"  # its experts are transposed, and gate and up take turns
    for name, value in model.state_dict().items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if rest.endswith("sinks"):
            found[f"blk.{layer}.attn_sinks.weight"] = value
            continue
        if "experts." in rest:
            kind = "bias" if rest.endswith("_bias") else "weight"
            value = value.transpose(1, 2) if turned and value.dim() == 3 else value
            gate, up = (
                (value[:, ::2], value[:, 1::2]) if turned else value.chunk(2, 1) if "up" in rest else (value,) * 2
            )
            parts = {"gate_exps": gate, "up_exps": up} if "gate_up" in rest else {"down_exps": value}
            found |= {f"blk.{layer}.ffn_{part}.{kind}": tensor for part, tensor in parts.items()}
            continue
        part = name.split(".")[-2]
        value = value[0] if part == "shared_expert_gate" else value
        if family.interleaved and part in heads:
            value = interleave_rope(value[:, None] if value.dim() < 2 else value, heads[part]).reshape(value.shape)
        shift = config.model_type.startswith("gemma") and name.endswith("norm.weight")
        found[str(names.get_name(name, (".weight", ".bias")))] = value + 1 if shift else value
    for kind in ("short", "long"):
        if f"{kind}_factor" in config.rope_parameters:
            found[f"rope_factors_{kind}.weight"] = torch.tensor(config.rope_parameters[f"{kind}_factor"])
    return found


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    writer = GGUFWriter(path, architecture)
    vocabulary = {
        "model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": MERGES, "eos_token_id": 2,
        "token_type": [3 if token in CONTROL else 1 for token in TOKENS],
    }  # fmt: skip
    facts = {f"{architecture}.{key}": value for key, value in keys.items()}
    for key, value in {**facts, **{f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}}.items():
        KINDS[type(value)](writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().float().numpy())
    finish(writer)


# what llama.cpp computes otherwise than the models: no window of Phi-3, normalised experts of Qwen3, EXAONE 4's window
# only with 64 layers, YaRN's dimensions rounded; over 46 layers its GELU, a table, adds up; small heads make it fail
OTHERWISE = [
    ("phi3", "sliding_window", WINDOW), ("qwen3moe", "norm_topk_prob", False), ("exaone4", "num_hidden_layers", 5),
    ("gpt-oss", "rope_parameters", YARN), ("gemma2", "num_hidden_layers", 46), ("qwen3vl", "head_dim", 8),
]  # fmt: skip
ALIKE = [c for c in CASES if not any(c[0] == name and c[2].get(field) == value for name, field, value in OTHERWISE)]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "family", "options", "keys"), ALIKE)
def test_llama_cpp_reads_the_same_from_the_file(
    repo_root: Path, tmp_path: Path, architecture: str, family: str, options: dict[str, Any], keys: dict[str, Any]
) -> None:
    pytest.importorskip("xllamacpp", reason="no llama.cpp: pip install xllamacpp")
    original, file = model_of(family, options), tmp_path / "tiny.gguf"
    write(file, architecture, {**keys_of(original.config), **keys}, tensors_of(original, architecture))
    text = torch.randperm(len(TOKENS) - 3)[:40] + 3
    command = [sys.executable, "-m", "tests.llama_cpp", str(file), json.dumps(text.tolist())]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True)
    model, _ = load_target(file, dtype="fp32", device="cpu")
    with torch.no_grad():
        log_p = model(text[None]).logits[0, -1].log_softmax(-1)
    tokens, found = zip(*json.loads(done.stdout.splitlines()[-1]), strict=True)
    torch.testing.assert_close(torch.tensor(found), log_p[list(tokens)], rtol=0, atol=0.005)  # its GELU is a table


@pytest.mark.parametrize(("architecture", "family", "options", "keys"), CASES)
def test_architectures_give_the_model_the_file_was_made_from(
    tmp_path: Path, architecture: str, family: str, options: dict[str, Any], keys: dict[str, Any]
) -> None:
    original = model_of(family, options)
    write(
        tmp_path / "tiny.gguf", architecture, {**keys_of(original.config), **keys}, tensors_of(original, architecture)
    )
    model, tokenizer = load_target(tmp_path / "tiny.gguf", dtype="fp32", device="cpu")
    assert type(model) is type(original) and tokenizer is not None and tokenizer("th")["input_ids"]
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)


def tiled(value: torch.Tensor, width: int, dim: int = 0) -> torch.Tensor:
    """Two value heads for each of two key heads, of this width, in ggml's order."""
    return value.unflatten(dim, (2, 2, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def test_qwen_3_5_is_read_without_its_mtp_layers(tmp_path: Path) -> None:
    """Transformers reads these files; a table of its keys is here."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
    rope["mrope_interleaved"] = True
    linear = {"value_head_dim": 8, "key_head_dim": 8, "num_value_heads": 4, "num_key_heads": 2}
    original = model_of("qwen3_5_text", dict(
        head_dim=16, layer_types=["linear_attention", "full_attention"], rope_parameters=rope,
        **{f"linear_{name}": value for name, value in linear.items()},
    ))  # fmt: skip
    names, tensors = get_tensor_name_map(MODEL_ARCH.QWEN35, 3), {}
    for name, value in original.state_dict().items():
        part = name.split("linear_attn.")[-1].split(".")[0]
        if part in ("in_proj_qkv", "conv1d"):
            value = torch.cat((value[:32], tiled(value[32:], 8))).squeeze()
        elif part in ("in_proj_z", "out_proj"):
            value = tiled(value, 8, int(part == "out_proj"))
        elif part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            value = tiled(-value.exp() if part == "A_log" else value, 1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            value = value + 1
        tensors[str(names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias")))] = value
    mtp = {"nextn.eh_proj": (32, 64), "nextn.enorm": (32,), "attn_norm": (32,), "ffn_up": (64, 32)}
    tensors |= {f"blk.2.{name}.weight": torch.zeros(shape) for name, shape in mtp.items()}
    keys = keys_of(original.config) | {
        "block_count": 3, "nextn_predict_layers": 1, "full_attention_interval": 2, "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2,
        "ssm.time_step_rank": 4, "ssm.inner_size": 32,
    }  # fmt: skip
    write(tmp_path / "tiny.gguf", "qwen35", keys, tensors)
    with pytest.warns(UserWarning, match="tiny.gguf: its MTP layers are left out"):
        model, _ = load_target(tmp_path / "tiny.gguf", dtype="fp32", device="cpu")
    ids = torch.arange(3, 63)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-4)
