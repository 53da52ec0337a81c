"""EAGLE heads of random odd layouts: what they estimate is a plain computation's, up to the rounding of that in fp32.

Sizes of heads, groups, biases, rotary scaling, layers, tables, types and files are drawn. The plain computation runs in
fp64 and in fp32: logits of thousands, which some draws have, leave fp32 fewer digits after the point.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fsd_infer import Target, TreeShape
from fsd_infer.drafters.loading import load_drafter
from fsd_infer.engine import Request, decode
from fsd_infer.rules import parse_rule
from tests.published_blocks import H, States, tiny_target
from tests.rules_toy import V
from tests.test_published_heads import PROMPTS, drafted, plain_of

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip


@dataclass
class Odd:
    """A drawn head: its config and tensors, and what the computation needs."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    is_eagle3: bool

    def estimate(self, states: States, text: list[int], drafts: list[int], dtype: torch.dtype) -> Tensor:
        """The logits after the drafts."""
        known = torch.cat(states.layers[:3], -1) if self.is_eagle3 else states.final
        table = self.tensors.get("embed_tokens.weight", states.model.get_input_embeddings().weight.detach())
        embeds = table[torch.tensor([*text[1:], *drafts])]
        out = self.output(embeds.to(dtype), known.to(dtype))
        if self.is_eagle3:
            return self.eagle3_logits(out)
        return linear(out, states.model.get_output_embeddings().weight.detach().to(dtype))

    def output(self, embeds: Tensor, known: Tensor, places: Tensor | None = None) -> Tensor:
        """The last output [H] over embeds [M + k, H] and the target's features of M tokens: its own outputs follow.

        ``places`` [M + k, pairs] are where each pair of dimensions stands, by default the tokens' numbers.
        """
        t = self._typed(embeds.dtype)
        known = linear(known, t["fc.weight"]) if self.is_eagle3 else known
        while len(known) <= len(embeds):
            known = torch.cat([known, self._layers(t, embeds[: len(known)], known, places)[-1:]])
        return known[-1]

    def eagle3_logits(self, out: Tensor) -> Tensor:
        t = self._typed(out.dtype)
        return linear(self._rms(out, t["norm.weight"]), t["lm_head.weight"])

    def _typed(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: x.to(dtype) for name, x in self.tensors.items() if x.is_floating_point()}

    def _layers(self, t: dict[str, Tensor], embeds: Tensor, x: Tensor, places: Tensor | None) -> Tensor:
        c, count = self.config, len(x)
        if not self.is_eagle3:
            x = linear(torch.cat([embeds, x], -1), t["fc.weight"], t.get("fc.bias"))
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        for layer in range(c["num_hidden_layers"]):
            p = {n.removeprefix(f"layers.{layer}."): v for n, v in t.items() if n.startswith(f"layers.{layer}.")}

            def part(y: Tensor, name: str, p: dict[str, Tensor] = p) -> Tensor:
                return linear(y, p[f"{name}.weight"], p.get(f"{name}.bias"))

            before = x
            if "hidden_norm.weight" in p:
                normed = self._rms(x, p["hidden_norm.weight"])
                n = torch.cat([self._rms(embeds, p["input_layernorm.weight"]), normed], -1)
                before = normed if c["norm_before_residual"] else x
            else:
                n = self._rms(x, p["input_layernorm.weight"]) if "input_layernorm.weight" in p else x
            q, k, v = (part(n, f"self_attn.{z}_proj").view(count, -1, c["head_dim"]).transpose(0, 1) for z in "qkv")
            groups = c["num_attention_heads"] // c["num_key_value_heads"]
            if "self_attn.q_norm.weight" in p:
                q, k = (self._rms(x, p[f"self_attn.{name}_norm.weight"]) for name, x in (("q", q), ("k", k)))
            q, k = self._turned(q, places), self._turned(k, places).repeat_interleave(groups, 0)
            scores = (q @ k.transpose(1, 2) / math.sqrt(c["head_dim"])).masked_fill(~causal, -math.inf)
            attended = scores.softmax(-1) @ v.repeat_interleave(groups, 0)
            x = before + part(attended.transpose(0, 1).reshape(count, -1), "self_attn.o_proj")
            m = self._rms(x, p["post_attention_layernorm.weight"])
            x = x + part(silu(part(m, "mlp.gate_proj")) * part(m, "mlp.up_proj"), "mlp.down_proj")
        return x

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * weight

    def _turned(self, x: Tensor, places: Tensor | None) -> Tensor:
        c, half = self.config, x.shape[-1] // 2
        rope = c["rope_scaling"] or ROPES[0]
        frequencies, scale = c["rope_theta"] ** -(torch.arange(half) / half), 1.0
        if rope["rope_type"] != "default":
            sizes = {name: c[name] for name in ("hidden_size", "num_attention_heads", "head_dim")}
            made = LlamaConfig(
                **sizes, max_position_embeddings=128, rope_parameters={**rope, "rope_theta": c["rope_theta"]}
            )
            frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](made, torch.device("cpu"))
        at = torch.arange(x.shape[1])[:, None] if places is None else places[: x.shape[1]]
        angles = at.double() * frequencies.double()
        cosine, sine = (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def drawn(seed: int) -> Odd:
    pick, is_eagle3 = random.Random(seed), bool(seed % 2)
    heads, groups = pick.choice([(4, 2), (2, 1), (8, 2), (1, 1)])
    width, inner, layers = pick.choice([4, 6, 8, 10]), pick.choice([24, 10, 33]), pick.choice([1, 1, 2, 3])
    dtype, scale = pick.choice([torch.float32, torch.bfloat16, torch.float16]), pick.choice([0.5, 1.5, 4.0])
    biases, own_embeds = {"self_attn": pick.random() < 0.3, "mlp": pick.random() < 0.3}, pick.random() < 0.4
    ids = sorted(pick.sample(range(V), V - 1)) if is_eagle3 and pick.random() < 0.5 else None
    random_generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random_generator) * scale / math.sqrt(shape[-1])).to(dtype)

    def norm(size: int = H) -> Tensor:
        return (1 + 0.3 * torch.randn(size, generator=random_generator)).to(dtype)

    tensors = {"fc.weight": rand(H, (3 if is_eagle3 else 2) * H)}
    for layer in range(layers):
        first = is_eagle3 and not layer
        shapes = {
            **{f"self_attn.{name}_proj": (rows * width, 2 * H if first else H)
               for name, rows in (("q", heads), ("k", groups), ("v", groups))},
            "self_attn.o_proj": (H, heads * width), "mlp.gate_proj": (inner, H), "mlp.up_proj": (inner, H),
            "mlp.down_proj": (H, inner),
        }  # fmt: skip
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = rand(*shape)
            if biases[name.partition(".")[0]]:
                tensors[f"layers.{layer}.{name}.bias"] = rand(shape[0])
        norms = ["post_attention_layernorm", *(["input_layernorm"] if is_eagle3 or layer else [])]
        tensors |= {f"layers.{layer}.{name}.weight": norm() for name in [*norms, *(["hidden_norm"] if first else [])]}
    if is_eagle3:
        tensors |= {"norm.weight": norm(), "lm_head.weight": rand(V if ids is None else len(ids), H)}
    if ids is not None:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
    elif is_eagle3:
        tensors["t2d"] = torch.ones(V + 1)  # not needed
    tensors |= {"embed_tokens.weight": rand(V, H)} if own_embeds else {}
    tensors |= {"fc.bias": rand(H)} if (fc_bias := not is_eagle3 and pick.random() < 0.5) else {}
    rope = pick.choice(ROPES)
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if is_eagle3 else "LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": H, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": groups,
        "head_dim": width, "num_hidden_layers": layers, "rms_norm_eps": pick.choice([1e-5, 1e-6]), "vocab_size": V,
        "hidden_act": "silu", "max_position_embeddings": 128, "rope_theta": pick.choice([1e4, 5e5, 100.0]),
        "rope_scaling": None if rope["rope_type"] == "default" else rope, "attention_bias": biases["self_attn"],
        "mlp_bias": biases["mlp"], "norm_before_residual": is_eagle3 and pick.random() < 0.4,
    }  # fmt: skip
    if not biases["mlp"] and pick.random() < 0.5:  # as in Qwen3, whatever the config calls its layers
        for layer in range(layers):
            tensors |= {f"layers.{layer}.self_attn.{name}_norm.weight": norm(width) for name in "qk"}
    if pick.random() < 0.5:  # the tensors alone say what is biased
        config["attention_bias"] = None
        del config["mlp_bias"]
    more = {"draft_vocab_size": V if ids is None else len(ids), "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    return Odd(config | (more if is_eagle3 else {"bias": fc_bias}), tensors, is_eagle3)


def write(odd: Odd, directory: Path, shards: int) -> Path:
    """Sizes that follow from others are null in configs of EAGLE-3, and missing in others."""
    heads = odd.config["num_attention_heads"]
    derived = {"num_key_value_heads": heads, "head_dim": H // heads}.items() & odd.config.items()
    config = odd.config | dict.fromkeys(dict(derived))
    config = config if odd.is_eagle3 else {name: value for name, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(odd.tensors)
    files = {f"model-{number}.safetensors": names[number::shards] for number in range(shards)}
    for file, held in files.items():
        save_file({name: odd.tensors[name] for name in held}, directory / file)
    places = {name: file for file, held in files.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


@cache
def plain() -> list[list[int]]:
    return plain_of(Target(tiny_target()), 8)


@pytest.mark.parametrize("seed", [*range(8), 27, 39])  # the last two: normed, with sizes that follow from others
def test_estimates_are_a_plain_computations(seed: int, tmp_path: Path) -> None:
    odd, target = drawn(seed), Target(tiny_target())
    drafter = load_drafter(str(write(odd, tmp_path, 1 + seed % 3)), target, TreeShape(3, 2, 8))
    assert drafter.name == "eagle"
    made = decode(target, drafter, parse_rule("exact"), Request(PROMPTS, 8, True))
    assert made.sequences == plain()
    tree, checked = drafted(drafter, PROMPTS), 0
    for row, text in enumerate(PROMPTS):
        states = States.of(target.model, text)
        for node in (tree.q_index[row] >= 0).nonzero()[:, 0].tolist():
            path = tree.tokens[row, tree.ancestors[row, node].nonzero()[1:, 0]].tolist()
            with torch.no_grad():
                exact, rounded = (odd.estimate(states, text, path, dtype) for dtype in (torch.float64, torch.float32))
            error = (tree.q_logits[row, tree.q_index[row, node]].double() - exact).abs().max()
            allowed = 1e-5 * max(1.0, float(exact.abs().max())) + 4 * (rounded.double() - exact).abs().max()
            assert error <= allowed, (path, float(error), float(exact.abs().max()))
            checked += 1
    assert checked > 6
