"""Random heads in the layouts of other programs, and what they estimate, computed plainly: one text, no cache.

A layout is the config.json and the tensors as its home writes them, and a function from (states of the target, text,
drafts) to the logits of the next draft. The text ends with the newest token, whose state the target does not have yet.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, linear, silu
from transformers import AutoModelForCausalLM, LlamaConfig

from fsd_core.functional import NEVER
from fsd_infer import Target
from tests.rules_toy import V

H, LAYERS, HEADS, GROUPS, WIDTH, INNER = 16, 4, 4, 2, 8, 24
BLOCK, MASK, RANK, WINDOW = 4, 3, 3, 3
TAPS, CHANNELS, CANDIDATES = 2, 4, 2
THETA, EPS = 10_000.0, 1e-6

Estimate = Callable[["States", list[int], list[int]], Tensor]


@dataclass
class States:
    """The target's states at every position of a text but the last: the final one, normed, and each layer's output."""

    model: Any
    final: Tensor
    layers: list[Tensor]
    text: list[int]

    @classmethod
    def of(cls, model: Any, text: list[int]) -> States:
        found: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda *x: found.append(_first(x[2])[0])) for layer in model.model.layers]
        with torch.no_grad():
            final = model.model(torch.tensor([text])).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return cls(model, final[:-1], [state[:-1] for state in found], text)

    def embed(self, ids: list[int]) -> Tensor:
        made: Tensor = self.model.get_input_embeddings()(torch.tensor(ids))
        return made

    def lm_head(self, x: Tensor) -> Tensor:
        made: Tensor = self.model.get_output_embeddings()(x)
        return made


@dataclass
class Layout:
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    estimate: Estimate
    depth: int
    ids: list[int] | None = None  # target id of each entry of the estimates
    target: Callable[[], Target] | None = None  # that it drafts for; None: tiny_target()

    def write(self, directory: Path, **changes: Any) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        config = {name: value for name, value in {**self.config, **changes}.items() if value is not Ellipsis}
        (directory / "config.json").write_text(json.dumps(config))
        save_file({name: value.contiguous() for name, value in self.tensors.items()}, directory / "model.safetensors")
        return directory


def _first(x: Any) -> Tensor:
    made: Tensor = x[0] if isinstance(x, tuple) else x
    return made


@cache
def tiny_target() -> Any:
    config = LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(6.0)
            else:
                parameter.data.normal_(1.0, 0.3)
    model.generation_config.eos_token_id = None
    return model


# block heads ---------------------------------------------------------------------------------------------------------

QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": WIDTH, "num_hidden_layers": 2, "rms_norm_eps": EPS, "vocab_size": V,
    "rope_theta": THETA, "rope_scaling": None, "max_position_embeddings": 128, "attention_bias": False,
    "layer_types": ["full_attention"] * 2, "hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


def rand(*shape: int, scale: float = 0.5) -> Tensor:
    return torch.randn(*shape) * scale


def norm(size: int) -> Tensor:
    return 1 + 0.2 * torch.randn(size)


def layer_tensors(read: int = H, normed: bool = False) -> dict[str, Tensor]:
    """A Llama-like layer that reads so many numbers, with norms of queries and keys or without."""
    made = {"input_layernorm": norm(H), "post_attention_layernorm": norm(H)}
    made |= {f"self_attn.{kind}_norm": norm(WIDTH) for kind in "qk" if normed}
    return made | {
        "self_attn.q_proj": rand(HEADS * WIDTH, read), "self_attn.k_proj": rand(GROUPS * WIDTH, read),
        "self_attn.v_proj": rand(GROUPS * WIDTH, read), "self_attn.o_proj": rand(H, HEADS * WIDTH),
        "mlp.gate_proj": rand(INNER, H), "mlp.up_proj": rand(INNER, H), "mlp.down_proj": rand(H, INNER),
    }  # fmt: skip


def backbone(count: int = 2, fused: int = 2) -> dict[str, Tensor]:
    tensors = {"fc.weight": rand(H, fused * H), "hidden_norm.weight": norm(H), "norm.weight": norm(H)}
    for j in range(count):
        tensors |= {f"layers.{j}.{name}.weight": value for name, value in layer_tensors(normed=True).items()}
    return tensors


def of_layer(t: dict[str, Tensor], j: int) -> dict[str, Tensor]:
    return {name.removeprefix(f"layers.{j}."): value for name, value in t.items() if name.startswith(f"layers.{j}.")}


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [heads, M, WIDTH]"""
    half = WIDTH // 2
    angles = positions[:, None] / THETA ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attend(p: dict[str, Tensor], n: Tensor, both: Tensor, own: Tensor, places: Tensor, visible: Tensor) -> Tensor:
    """Attention of n [M, read], at the positions ``own``, to all of ``both`` [S, read]; visible: [M, S]."""
    q, k, v = (
        linear(x, p[f"self_attn.{kind}_proj.weight"]).view(len(x), -1, WIDTH).transpose(0, 1)
        for kind, x in (("q", n), ("k", both), ("v", both))
    )
    if "self_attn.q_norm.weight" in p:
        q, k = rms(q, p["self_attn.q_norm.weight"]), rms(k, p["self_attn.k_norm.weight"])
    k, v = (x.repeat_interleave(HEADS // GROUPS, 0) for x in (rotated(k, places), v))
    scores = (rotated(q, own) @ k.transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(~visible, -math.inf).exp()
    sink = p.get("self_attn.attention_sink_bias", torch.tensor([-math.inf])).exp()
    weights = scores / (scores.sum(-1, keepdim=True) + sink[:, None, None])
    return linear((weights @ v).transpose(0, 1).reshape(len(n), -1), p["self_attn.o_proj.weight"])


def mlp(p: dict[str, Tensor], m: Tensor) -> Tensor:
    inner = silu(linear(m, p["mlp.gate_proj.weight"])) * linear(m, p["mlp.up_proj.weight"])
    return linear(inner, p["mlp.down_proj.weight"])


def convolved(t: dict[str, Tensor], name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """DFlash2's convolutions over the slots x [B, H] before and after a sublayer; without any, the sublayer alone."""
    if f"{name}.base_kernel" not in t:
        return sublayer(x)
    dynamic = linear(x, t[f"{name}.kernel_projection.weight"]).view(len(x), 2, TAPS, H // CHANNELS)

    def convolve(y: Tensor, side: int) -> Tensor:
        made = torch.zeros_like(y)
        for slot in range(len(y)):
            for back in range(min(TAPS, slot + 1)):
                kernel = t[f"{name}.base_kernel"][side, back] + dynamic[slot, side, back].repeat_interleave(CHANNELS)
                made[slot] += kernel * y[slot - back]
        return made

    return convolve(sublayer(convolve(x, 0)), 1)


def block_states(
    t: dict[str, Tensor], context: Tensor, embeds: Tensor, windows: list[int | None], causal: list[bool],
    of_root: bool = False,
) -> Tensor:  # fmt: skip
    """z [B, H] of a block's embeddings, with the target's features [P, m·H] of all positions before it.

    Windows ``of_root`` are as many positions before the block.
    """
    seen, size = len(context), len(embeds)
    c, z = rms(linear(context, t["fc.weight"]), t["hidden_norm.weight"]), embeds
    places, own = torch.arange(seen + size), torch.arange(seen, seen + size)
    for j in range(len(windows)):
        p, visible = of_layer(t, j), torch.ones(size, seen + size, dtype=torch.bool)
        if (window := windows[j]) is not None:
            visible &= places >= (torch.tensor([[seen]]) if of_root else own[:, None] + 1) - window
        if causal[j]:
            visible &= places <= own[:, None]
        to_all = partial(lambda p, visible, n: attend(p, n, torch.cat([c, n]), own, places, visible), p, visible)
        z = z + convolved(p, "attention_conv", rms(z, p["input_layernorm.weight"]), to_all)
        z = z + convolved(p, "mlp_conv", rms(z, p["post_attention_layernorm.weight"]), partial(mlp, p))
    return rms(z, t["norm.weight"])


def of_blocks(
    tensors: dict[str, Tensor],
    layers: list[int],
    first: int,
    correct: Callable[..., Tensor] | None = None,
    windows: list[int | None] | None = None,
    causal: list[bool] | None = None,
    prefix: str = "",
    of_root: bool = False,
) -> Estimate:
    """What a block head estimates; ``first`` is the slot of the first draft."""
    t = {name.removeprefix(prefix): value for name, value in tensors.items()}

    def estimate(states: States, text: list[int], drafts: list[int]) -> Tensor:
        ids = [text[-1], *[MASK] * (BLOCK - 1)]
        table = t.get("embed_tokens.weight")
        embeds = states.embed(ids) if table is None else embedding(torch.tensor(ids), table)
        context = torch.cat([states.layers[i] for i in layers], -1)
        z = block_states(t, context, embeds, windows or [None] * 2, causal or [False] * 2, of_root)
        head = t.get("lm_head.weight")
        base = states.lm_head(z) if head is None else linear(z, head)
        slot = first + len(drafts)
        logits = base[slot]
        return logits if correct is None else logits + correct(t, states, z, [text[-1], *drafts], first)

    return estimate


def markov_tensors(kind: str, drafted: int = V) -> dict[str, Tensor]:
    made = {"markov_head.markov_w1.weight": rand(V, RANK, scale=1), "markov_head.markov_w2.weight": rand(drafted, RANK)}
    name, shape = {"gated": ("gate_proj", (RANK, H + RANK)), "rnn": ("joint_proj", (3 * RANK, 2 * RANK + H))}.get(
        kind, ("", ())
    )
    if name:
        made |= {f"markov_head.{name}.weight": rand(*shape), f"markov_head.{name}.bias": rand(shape[0])}
    return made


def vanilla(t: dict[str, Tensor], states: States, z: Tensor, known: list[int], first: int) -> Tensor:
    return t["markov_head.markov_w2.weight"] @ t["markov_head.markov_w1.weight"][known[-1]]


def gated(t: dict[str, Tensor], states: States, z: Tensor, known: list[int], first: int) -> Tensor:
    e, slot = t["markov_head.markov_w1.weight"][known[-1]], z[first + len(known) - 1]
    gate = linear(torch.cat([slot, e]), t["markov_head.gate_proj.weight"], t["markov_head.gate_proj.bias"]).sigmoid()
    return t["markov_head.markov_w2.weight"] @ (gate * e)


def rnn(t: dict[str, Tensor], states: States, z: Tensor, known: list[int], first: int) -> Tensor:
    """Trained over every slot of the block, the idle one included, whose previous token is the root as well."""
    s, out = torch.zeros(RANK), torch.zeros(RANK)
    for slot, token in enumerate([known[0]] * first + known):
        e = t["markov_head.markov_w1.weight"][token]
        read = torch.cat([s, e, z[slot]])
        g, c, out = linear(read, t["markov_head.joint_proj.weight"], t["markov_head.joint_proj.bias"]).chunk(3)
        s = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh()
    return t["markov_head.markov_w2.weight"] @ out.tanh()


STATE, NARROW = 5, 6


def domino_tensors() -> dict[str, Tensor]:
    return {
        "prefix_gru.weight_ih_l0": rand(3 * STATE, H), "prefix_gru.weight_hh_l0": rand(3 * STATE, STATE),
        "embed_proj.0.weight": rand(NARROW, H + STATE, scale=1), "embed_proj.2.weight": rand(V, NARROW, scale=1),
    }  # fmt: skip


def domino(t: dict[str, Tensor], states: States, z: Tensor, known: list[int], first: int) -> Tensor:
    """pure_draft_prefix_len 1: the first draft is not corrected."""
    if len(known) == 1:
        return torch.zeros(V)
    gru = torch.nn.GRU(H, STATE, bias=False, batch_first=True)
    gru.load_state_dict({name.removeprefix("prefix_gru."): t[name] for name in t if name.startswith("prefix_gru.")})
    with torch.no_grad():
        state = gru(states.embed(known)[None])[0][0, -1]
    read = torch.cat([z[first + len(known) - 1], state])
    return linear(silu(linear(read, t["embed_proj.0.weight"])), t["embed_proj.2.weight"])


def confidence(t: dict[str, Tensor], z: Tensor, slot: int, token: int) -> float:
    """Chance that the draft after a token is accepted."""
    read = torch.cat([z[slot], t["markov_head.markov_w1.weight"][token]])
    weight, bias = t["confidence_head.proj.weight"], t["confidence_head.proj.bias"]
    return float(linear(read, weight, bias).detach().sigmoid())


def confidence_tensors(width: int = H + RANK) -> dict[str, Tensor]:
    return {"confidence_head.proj.weight": rand(1, width, scale=0.2), "confidence_head.proj.bias": torch.ones(1)}


def of_speculators(kind: str, drafted: int, anchor: bool | None, **options: Any) -> dict[str, Any]:
    said = {} if anchor is None else {"sample_from_anchor": anchor}
    return {
        "speculators_model_type": kind, "architectures": [f"{kind[:2].upper()}{kind[2:]}Speculator"],
        "transformer_layer_config": QWEN3, "draft_vocab_size": drafted, "block_size": BLOCK, "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, LAYERS], "target_hidden_size": None, **said,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": BLOCK - 1}]}, **options,
    }  # fmt: skip


def z_lab(**nested: Any) -> dict[str, Any]:
    return {
        **QWEN3, "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": BLOCK, "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2], **nested},
    }  # fmt: skip


def selector(t: dict[str, Tensor], states: States, z: Tensor, known: list[int], first: int) -> Tensor:
    """The likeliest tokens of a slot alone, by the token before them."""
    slot = z[first + len(known) - 1]
    base = states.lm_head(slot)
    made = NEVER - base
    p, s, w = (
        t[f"candidate_selector.{name}"]
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    for token in base.argsort(descending=True)[:CANDIDATES]:
        made[token] = (p[known[-1]] * (w @ slot) * s[token]).sum()
    return made


def refiner_tensors(drafted: int) -> dict[str, Tensor]:
    shapes = {
        "token_embed.weight": (V, RANK), "down_h.weight": (RANK, H), "down_g.weight": (RANK, H),
        "in_proj.weight": (RANK, 3 * RANK), "mix_l": (RANK, BLOCK, BLOCK), "mlp_gate.weight": (2 * RANK, RANK),
        "mlp_up.weight": (2 * RANK, RANK), "mlp_down.weight": (RANK, 2 * RANK), "readout.weight": (drafted, RANK),
    }  # fmt: skip
    return {f"refiner_head.{name}": rand(*shape, scale=1) for name, shape in shapes.items()}


def refiner(t: dict[str, Tensor], states: States, z: Tensor, known: list[int], first: int) -> Tensor:
    """XPress: every slot so far counts; an idle one reads the token before the root."""
    r = {name.removeprefix("refiner_head."): value for name, value in t.items()}
    read, last = [states.text[-2:][0]] * first + known, first + len(known) - 1
    whole = r["down_g.weight"] @ z.mean(0)
    inputs = [torch.cat([r["down_h.weight"] @ z[k], whole, r["token_embed.weight"][x]]) for k, x in enumerate(read)]
    slots = [r["in_proj.weight"] @ each for each in inputs]
    x = slots[last] + sum(r["mix_l"][:, last, k] * slots[k] for k in range(last + 1))
    x = x + r["mlp_down.weight"] @ (silu(r["mlp_gate.weight"] @ x) * (r["mlp_up.weight"] @ x))
    return r["readout.weight"] @ x
