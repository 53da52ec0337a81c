"""The architectures of GGUF files that are read here: how each differs from Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Join = tuple[tuple[str, ...], Callable[..., Tensor]]  # names of tensors in a layer, and what makes a parameter of them


def _rows(gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((gate, up), 1)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """[experts, width, …] twice -> [experts, 2 * width, …], with gate and up in turns."""
    return torch.stack((gate, up), 2).flatten(1, 2)


_GATE_UP, _DOWN = ("ffn_gate_exps", "ffn_up_exps"), ("ffn_down_exps",)
_EXPERTS: dict[str, Join] = {
    "mlp.experts.gate_up_proj": (tuple(f"{name}.weight" for name in _GATE_UP), _rows),
    "mlp.experts.down_proj": (("ffn_down_exps.weight",), lambda down: down),
}
_GPT_OSS: dict[str, Join] = {
    "mlp.experts.gate_up_proj": (_EXPERTS["mlp.experts.gate_up_proj"][0], lambda *w: _alternating(*w).transpose(1, 2)),
    "mlp.experts.gate_up_proj_bias": (tuple(f"{name}.bias" for name in _GATE_UP), _alternating),
    "mlp.experts.down_proj": (("ffn_down_exps.weight",), lambda down: down.transpose(1, 2)),
    "mlp.experts.down_proj_bias": (("ffn_down_exps.bias",), lambda down: down),
    "self_attn.sinks": (("attn_sinks.weight",), lambda sinks: sinks),
}


@dataclass(frozen=True)
class Family:
    """How the files of an architecture are read.

    Attributes:
        model_type: transformers' name of it.
        fields: the config's field, by key.
        fixed: what the config holds beyond the keys.
        ignored: keys without effect on text.
        epsilon: key and field of the norms' epsilon.
        interleaved: query and key projections have rows in ggml's rotary order.
        shifted: norms are stored plus one.
        partial: only a part of a head may be rotated.
        biased: ``attention_bias`` and ``mlp_bias`` tell whether there are biases.
        factors: Llama 3's rotary scaling may be stored as a tensor.
        period: of a window's layers, each ``period``-th has none, if the file does not say which.
        local: rotary base of layers with a window; None: the same as of the others.
        largest: number of layers of the model whose scores are scaled by hidden size and heads, not by their width.
        joins: parameters of a layer that are made of other tensors than their names tell.
        kept: whether weights can stay in their blocks.
        architecture: its name in files.
    """

    model_type: str
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    interleaved: bool = False
    shifted: bool = False
    partial: bool = False
    biased: bool = False
    factors: bool = False
    period: int | None = None
    local: float | None = None
    largest: int | None = None
    joins: Mapping[str, Join] = field(default_factory=dict)
    kept: bool = False
    architecture: str = ""

    @property
    def read(self) -> frozenset[str]:
        """Keys that only some families have."""
        windows = _WINDOWS if self.period is not None or self.model_type == "phi3" else ()
        return frozenset({*self.fields, *self.ignored, *windows})


_WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern")
_LAYER_NORM = "attention.layer_norm_epsilon"
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_MOE = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_weights_norm": "norm_topk_prob"
}  # fmt: skip
_LOCAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_GELU = "gelu_pytorch_tanh"
_GEMMA: dict[str, Any] = {"shifted": True, "fields": _CAPS, "fixed": {"hidden_activation": _GELU}}
_VISION = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
_TEMPERATURE = frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"})
_NO_WINDOW = {"use_sliding_window": False}
_MIXTRAL = Family("mixtral", _LOCAL, interleaved=True, joins=_EXPERTS)

FAMILIES: dict[str, Family] = {  # by architecture
    "llama": Family("llama", interleaved=True, biased=True, factors=True, kept=True),
    "qwen2": Family("qwen2", kept=True),
    "qwen3": Family("qwen3", kept=True),
    "qwen2vl": Family("qwen2", ignored=_VISION),
    "qwen3vl": Family("qwen3", ignored=_VISION),
    "qwen2moe": Family(
        "qwen2_moe", {**_MOE, **_WIDTH, **_SHARED}, {"norm_topk_prob": False, **_NO_WINDOW}, joins=_EXPERTS
    ),
    "qwen3moe": Family("qwen3_moe", {**_MOE, **_WIDTH}, {"norm_topk_prob": True, **_NO_WINDOW}, joins=_EXPERTS),
    "gemma": Family("gemma", fixed={"hidden_act": _GELU}, shifted=True),
    "gemma2": Family("gemma2", period=2, largest=46, **_GEMMA),
    "gemma3": Family("gemma3_text", period=6, largest=62, local=10_000.0, **_GEMMA),
    "phi3": Family("phi3", partial=True),
    "smollm3": Family("smollm3", interleaved=True, biased=True),
    "mistral3": Family("ministral3", ignored=_TEMPERATURE, interleaved=True),  # its rotary parameters have them
    "granite": Family("granite", _SCALES, interleaved=True, biased=True),
    "arcee": Family("arcee", fixed={"hidden_act": "relu2"}, interleaved=True, biased=True, factors=True),
    "olmo2": Family("olmo2", biased=True, period=4),
    "exaone4": Family("exaone4", factors=True, period=4),
    "seed_oss": Family("seed_oss", fixed={"attention_out_bias": False}, biased=True),
    "glm4": Family("glm4", partial=True, biased=True),
    "ernie4_5": Family("ernie4_5", fixed={"use_bias": False}),
    "hunyuan-dense": Family("hunyuan_v1_dense", biased=True),
    "starcoder2": Family(
        "starcoder2", fixed={"hidden_act": _GELU, "use_bias": True}, epsilon=(_LAYER_NORM, "norm_epsilon")
    ),
    "command-r": Family("cohere", {"logit_scale": "logit_scale"}, epsilon=(_LAYER_NORM, "layer_norm_eps")),
    "cohere2": Family("cohere2", {"logit_scale": "logit_scale"}, epsilon=(_LAYER_NORM, "layer_norm_eps"), period=4),
    "gpt-oss": Family(
        "gpt_oss", _LOCAL, {"attention_bias": True}, frozenset({"expert_feed_forward_length"}), period=2, joins=_GPT_OSS
    ),
}


def family_of(facts: Mapping[str, Any]) -> Family | None:
    """Return how a file is read, by its metadata; None for an architecture that is not read here."""
    architecture = facts.get("general.architecture")
    if architecture == "llama" and facts.get("llama.expert_count"):
        return replace(_MIXTRAL, architecture="llama")
    family = FAMILIES.get(str(architecture))
    return family and replace(family, architecture=str(architecture))
