"""Random heads of other programs in all layouts; those of blocks are in tests/published_block_heads.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, linear, silu

from tests import published_block_heads as block_heads
from tests import published_blocks as blocks
from tests.published_assistants import ASSISTANTS
from tests.published_blocks import HEADS, INNER, MASK, QWEN3, THETA, H, Layout, States, V, mlp, norm, rand, rms
from tests.published_mtp import MTP

# heads without attention ---------------------------------------------------------------------------------------------


def medusa_head(of_vllm: bool) -> Layout:
    heads, blocks = 3, 2
    w = [[rand(H, H) for _ in range(blocks)] for _ in range(heads)]
    b = [[rand(H) for _ in range(blocks)] for _ in range(heads)]
    u = [rand(V, H) for _ in range(heads)]
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        for j in range(blocks):
            if of_vllm:
                tensors[f"blocks.{i}.layers.{j}.weight"] = w[i][j]
            else:
                tensors |= {f"{i}.{j}.linear.weight": w[i][j], f"{i}.{j}.linear.bias": b[i][j]}
        tensors[f"lm_heads.{i}.weight" if of_vllm else f"{i}.{blocks}.weight"] = u[i]

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        y = states.final[-1]
        for j in range(blocks):
            y = y + silu(linear(y, w[len(drafts)][j], None if of_vllm else b[len(drafts)][j]))
        return u[len(drafts)] @ y

    config: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "x"}
    if of_vllm:
        config = {
            "model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": heads, "medusa_fc_bias": False,
        }  # fmt: skip
    return Layout(config, tensors, estimate, heads)


def hydra_head() -> Layout:
    heads = 3
    tensors: dict[str, Tensor] = {}
    for i in range(heads):
        first = f"hydra_mlp.{i}.0."
        for name in ("linear", "res_connection"):
            tensors |= {f"{first}{name}.weight": rand(H, (i + 2) * H), f"{first}{name}.bias": rand(H)}
        tensors |= {f"hydra_mlp.{i}.1.linear.weight": rand(H, H), f"hydra_mlp.{i}.1.linear.bias": rand(H)}
        tensors |= {f"hydra_lm_head.{i}.weight": rand(V, H), f"hydra_lm_head.{i}.bias": rand(V)}

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        def layer(name: str, x: Tensor) -> Tensor:
            return linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

        i = len(drafts)
        x = torch.cat([states.final[-1], *states.embed([text[-1], *drafts])])
        y = layer(f"hydra_mlp.{i}.0.res_connection", x) + silu(layer(f"hydra_mlp.{i}.0.linear", x))
        y = y + silu(layer(f"hydra_mlp.{i}.1.linear", y))
        return layer(f"hydra_lm_head.{i}", y)

    config = {"hydra_num_heads": heads, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    return Layout(config, tensors, estimate, heads)


def mlp_speculator(tied: bool) -> Layout:
    steps, width = 3, 12
    tensors: dict[str, Tensor] = {}
    for i in range(steps):
        own = {
            "emb": rand(V, width, scale=1), "proj": rand(width, width if i else H), "head": rand(V, width, scale=1),
            "ln": norm(width), "bias": rand(width),
        }  # fmt: skip
        for name, value in own.items():
            stored = f"speculator.ln.{i}.bias" if name == "bias" else f"speculator.{name}.{i}.weight"
            if tied and i > (name == "proj"):
                value = tensors[stored.replace(f".{i}.", f".{int(name == 'proj')}.")].clone()
            tensors[stored] = value

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        s = rms(states.final[-1]) / math.sqrt(2) if tied else states.final[-1]
        keeps = 0.5 ** (0.5 / steps)
        for i, token in enumerate([text[-1], *drafts]):
            z = tensors[f"speculator.emb.{i}.weight"][token] * math.sqrt((1 - keeps**2) * width / 2) / keeps
            s = tensors[f"speculator.proj.{i}.weight"] @ s + z
            s = gelu(rms(s, tensors[f"speculator.ln.{i}.weight"]) + tensors[f"speculator.ln.{i}.bias"])
        return tensors[f"speculator.head.{i}.weight"] @ s

    config = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": H,
        "inner_dim": width, "vocab_size": V, "n_predict": steps, "tie_weights": tied, "scale_input": tied,
    }  # fmt: skip
    return Layout(config, tensors, estimate, steps)


# P-EAGLE -------------------------------------------------------------------------------------------------------------


def p_eagle_head() -> Layout:
    """Two layers; the second is a plain Llama layer."""
    ids = [0, 1, 3]
    tensors = {
        "fc.weight": rand(H, 3 * H), "norm.weight": norm(H), "mask_hidden": rand(1, 1, 3 * H),
        **block_heads.reduced_tables(ids),
    }  # fmt: skip
    for j in range(2):
        own = blocks.layer_tensors(H if j else 2 * H) | ({} if j else {"hidden_norm": norm(H)})
        tensors |= {f"layers.{j}.{name}.weight": value for name, value in own.items()}

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        t, masks = tensors, len(drafts)
        embeds = embedding(torch.tensor([*text[1:], *[MASK] * masks]), t["embed_tokens.weight"])
        fused = torch.cat([states.layers[i] for i in (0, 1, 3)], -1)
        x = linear(torch.cat([fused, t["mask_hidden"][0].expand(masks, -1)]), t["fc.weight"])
        places = torch.arange(len(x))
        for j in range(2):
            p = blocks.of_layer(t, j)
            n = rms(embeds if j == 0 else x, p["input_layernorm.weight"])
            n = n if j else torch.cat([n, rms(x, p["hidden_norm.weight"])], -1)
            x = x + blocks.attend(p, n, n, places, places, places <= places[:, None])
            x = x + mlp(p, rms(x, p["post_attention_layernorm.weight"]))
        return linear(rms(x[-1], t["norm.weight"]), t["lm_head.weight"])

    config = {
        **QWEN3, "model_type": "llama", "architectures": ["PEagleDraftModel"], "draft_vocab_size": len(ids),
        "mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_residual": False,
    }  # fmt: skip
    return Layout(config, tensors, estimate, 8, ids)


# EAGLE-3 with DeepSeek's attention -----------------------------------------------------------------------------------

LATENT, PLAIN, TURNED, VALUE = 12, 4, 4, 6  # widths: of keys and values together, and by head


def turned(x: Tensor, places: Tensor) -> Tensor:
    """x [..., M, TURNED], pairs of neighbours turned as YaRN does for texts four times as long as 32 tokens."""
    number = torch.arange(TURNED // 2)
    slow, fast = (TURNED * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (1, 32))
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), TURNED - 1)
    share = ((number - low) / (high - low)).clamp(0, 1)
    angles = places[:, None] * THETA ** (-2 * number / TURNED) * (1 - share + share / 4)
    y = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * torch.polar(torch.ones(()), angles)
    return torch.view_as_real(y).flatten(-2)


def latent_head(rank: int | None) -> Layout:
    """Queries through ``rank`` numbers, or whole; two layers, the second without the embeddings."""
    ids, tensors = [0, 1, 3], {"fc.weight": rand(H, 3 * H), "norm.weight": norm(H)}
    tables = block_heads.reduced_tables(ids)
    tensors |= {name: value for name, value in tables.items() if not name.startswith("verifier")}
    for j in range(2):
        read, wide = H if j else 2 * H, HEADS * (PLAIN + TURNED)
        queries = {"q_proj": rand(wide, read, scale=0.3)}
        if rank:
            queries = {"q_a_proj": rand(rank, read), "q_a_layernorm": norm(rank), "q_b_proj": rand(wide, rank)}
        own = {f"self_attn.{name}": value for name, value in queries.items()} | {
            "self_attn.kv_a_proj_with_mqa": rand(LATENT + TURNED, read), "self_attn.kv_a_layernorm": norm(LATENT),
            "self_attn.kv_b_proj": rand(HEADS * (PLAIN + VALUE), LATENT), "self_attn.o_proj": rand(H, HEADS * VALUE),
            "mlp.gate_proj": rand(INNER, H), "mlp.up_proj": rand(INNER, H), "mlp.down_proj": rand(H, INNER),
            "input_layernorm": norm(H), "post_attention_layernorm": norm(H), **({} if j else {"hidden_norm": norm(H)}),
        }  # fmt: skip
        tensors |= {f"layers.{j}.{name}.weight": value for name, value in own.items()}

    def layer(j: int, embeds: Tensor, x: Tensor) -> Tensor:
        p, places = blocks.of_layer(tensors, j), torch.arange(len(x))
        n = rms(x if j else embeds, p["input_layernorm.weight"])
        n = n if j else torch.cat([n, rms(x, p["hidden_norm.weight"])], -1)
        a = {name.removeprefix("self_attn."): p[name] for name in p if name.startswith("self_attn.")}
        if rank:
            n_q, w_q = rms(linear(n, a["q_a_proj.weight"]), a["q_a_layernorm.weight"]), a["q_b_proj.weight"]
        else:
            n_q, w_q = n, a["q_proj.weight"]
        q = linear(n_q, w_q).view(len(x), HEADS, -1).transpose(0, 1)
        latent, shared = linear(n, a["kv_a_proj_with_mqa.weight"]).split([LATENT, TURNED], -1)
        both = linear(rms(latent, a["kv_a_layernorm.weight"]), a["kv_b_proj.weight"])
        k, v = both.view(len(x), HEADS, -1).transpose(0, 1).split([PLAIN, VALUE], -1)
        scores = q[..., :PLAIN] @ k.transpose(1, 2) + turned(q[..., PLAIN:], places) @ turned(shared, places).T
        scores = scores * (1 + 0.1 * math.log(4)) ** 2 / math.sqrt(PLAIN + TURNED)
        seen = scores.masked_fill(places > places[:, None], -math.inf).softmax(-1)
        x = x + linear((seen @ v).transpose(0, 1).reshape(len(x), -1), a["o_proj.weight"])
        return x + mlp(p, rms(x, p["post_attention_layernorm.weight"]))

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        x = linear(torch.cat([states.layers[i] for i in (0, 1, 3)], -1), tensors["fc.weight"])
        for count in range(len(drafts) + 1):
            embeds = embedding(torch.tensor([*text[1:], *drafts[:count]]), tensors["embed_tokens.weight"])
            out = layer(1, embeds, layer(0, embeds, x))
            x = torch.cat([x, out[-1:]])
        return linear(rms(out[-1], tensors["norm.weight"]), tensors["lm_head.weight"])

    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    config = {
        **{name: value for name, value in QWEN3.items() if name not in ("layer_types", "head_dim")},
        "model_type": "kimi_k2", "architectures": ["Eagle3DeepseekV2ForCausalLM"], "draft_vocab_size": len(ids),
        "num_key_value_heads": HEADS, "q_lora_rank": rank, "kv_lora_rank": LATENT, "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": TURNED, "v_head_dim": VALUE, "n_routed_experts": 384, "first_k_dense_replace": 1,
        "rope_scaling": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True},
    }  # fmt: skip
    return Layout(config, tensors, estimate, 8, ids)


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "dflash of z-lab": block_heads.z_lab_head, "dflash with sinks": block_heads.sliding_head,
    "dflash of speculators": lambda: block_heads.speculators_head("dflash"), "dflash2": block_heads.dflash2_head,
    "dflash of DeepSpec": lambda: block_heads.deep_spec("none"), "dspark of SpecForge": block_heads.early_head,
    "dspark of DeepSpec, gated": lambda: block_heads.deep_spec("gated"),
    "dspark of DeepSpec, rnn": lambda: block_heads.deep_spec("rnn", copies=False),
    "dspark of speculators": lambda: block_heads.speculators_head("dspark", "vanilla", anchor=True),
    "dspark of speculators, filling in": lambda: block_heads.speculators_head("dspark", "rnn"),
    "xpress": lambda: block_heads.speculators_head("xpress"), "domino": lambda: block_heads.domino_head(True),
    "domino, filling in": lambda: block_heads.domino_head(False), "p-eagle": p_eagle_head,
    "eagle3, latent": lambda: latent_head(10), "eagle3, whole latent queries": lambda: latent_head(None),
    "medusa": lambda: medusa_head(False), "medusa of vLLM": lambda: medusa_head(True), "hydra": hydra_head,
    "mlp speculator": lambda: mlp_speculator(False), "mlp speculator, tied": lambda: mlp_speculator(True), **MTP,
    **ASSISTANTS,
}  # fmt: skip


@cache
def layout(name: str) -> Layout:
    with torch.random.fork_rng():
        torch.manual_seed(crc32(name.encode()))  # further layouts change no other's
        return LAYOUTS[name]()
