"""Export of heads to SafeAILab's EAGLE, vLLM, SGLang and speculators. :mod:`.formats` reads these formats.

If a format cannot express a head, the error names the reason and the nearest alternative.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fsd_core.errors import CheckpointError
from fsd_core.files import replacing, write_json
from fsd_infer.heads import FORMATS
from fsd_infer.heads.config import EagleConfig, usual_layers
from fsd_infer.heads.eagle_formats import AUX_IDS, EAGLE3_FLAGS
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.layers import LATENT, has_mrope
from fsd_infer.heads.stored_parts import CONFIG, D2T, DRAFT_IDS, FIRST_LAYER, LM_HEAD, MIDLAYER, T2D
from fsd_infer.heads.weights import SINGLE

TOKEN_MAP = "hot_token_ids.pt"  # what SGLang's --speculative-token-map takes
# A program's architecture names for heads of EAGLE-1/2 (None: not supported) and EAGLE-3.
ARCHITECTURES = {
    "eagle": ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "vllm": ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "sglang": ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"),
    "speculators": (None, "Eagle3Speculator"),
}
_SPECULATED = 5  # tokens per round that a speculators config proposes
_GREEDY = {
    "proposal_type": "greedy",
    "speculative_tokens": _SPECULATED,
    "verifier_accept_k": 1,
    "accept_tolerance": 0.0,
}

# Why a program cannot read a head: the programs, a test, and the reason if the test's result is true.
_Obstacle = tuple[str, Callable[[EagleConfig, int], Any], str]
_NOT_EAGLE: list[_Obstacle] = [
    ("eagle vllm sglang speculators", lambda c, n: _of_fsd_alone(c),
     "no other program knows {found} of layout fsd. Train one with head.layout: eagle3."),
    ("speculators", lambda c, n: True,
     "speculators has no EAGLE-1/2 heads any more. Use --to vllm, or train one with head.layout: eagle3."),
    ("eagle vllm sglang", lambda c, n: c.embed_size != c.hidden_size,
     "embeddings and features must be equally wide there."),
    ("vllm sglang", lambda c, n: c.layer["model_type"] != "llama" and c.layer["model_type"],
     "its layer is {found}'s, there it is Llama's. Train one with head.layer: llama."),
    ("eagle", lambda c, n: c.layer["model_type"] not in ("llama", "qwen2") and c.layer["model_type"],
     "its layer is {found}'s, there it is Llama's. Train one with head.layer: llama."),
    ("vllm", lambda c, n: c.fc_bias,
     "vLLM has no bias in fc. Use --to eagle or sglang, or train one with head.fc_bias: false."),
]  # fmt: skip
_NOT_EAGLE3: list[_Obstacle] = [
    ("eagle vllm sglang speculators", lambda c, n: c.layer["model_type"] == LATENT,
     "latent attention is written in fsd's own format alone. Use the files that the head was read from."),
    ("eagle sglang", lambda c, n: c.layer["model_type"] != "llama" and c.layer["model_type"],
     "its layer is {found}'s, there it is Llama's. Use --to vllm or speculators."),
    ("eagle sglang", lambda c, n: c.num_layers > 1 and c.num_layers,
     "it has {found} layers, there is one. Use --to vllm or speculators."),
    ("eagle sglang", lambda c, n: c.norm_before_residual,
     "norm_before_residual is unknown there. Use --to vllm or speculators."),
    ("eagle sglang", lambda c, n: len(c.fused_layers) != 3 and len(c.fused_layers),
     "it fuses {found} layers, there are always three. Use --to vllm or speculators."),
    ("eagle sglang", lambda c, n: c.norm_before_fc, "norm_before_fc is unknown there. Use --to vllm or speculators."),
    ("eagle", lambda c, n: c.fc_norm or c.norm_output,
     "fc_norm and norm_output are unknown to SafeAILab's code. Use --to vllm, sglang or speculators."),
    ("eagle", lambda c, n: c.fused_layers != usual_layers(n) and c.fused_layers,
     "SafeAILab's code always fuses layers {usual}, this one {found} (numbers from 0). Use --to vllm, sglang or "
     "speculators."),
]  # fmt: skip
_NOT_SAFEAILAB: list[_Obstacle] = [
    ("eagle", lambda c, n: (kind := _rope(c)[0]) not in ("default", "linear", "dynamic") and kind,
     "SafeAILab's code does not know positions of type {found}. Use --to vllm or sglang."),
    ("eagle speculators", lambda c, n: has_mrope(c.layer), "M-RoPE is unknown there. Use --to vllm or sglang."),
    ("eagle", lambda c, n: c.layer.get("head_dim", 0) * c.layer["num_attention_heads"] not in (0, c.hidden_size),
     "SafeAILab's code takes hidden_size / num_attention_heads as head_dim. Use --to vllm or sglang."),
]  # fmt: skip


@dataclass(frozen=True)
class ExportFacts:
    """The facts about the target that formats store.

    Attributes:
        name: directory or hub id, for engines.
        architectures: architectures of its config.
        layers: their number.
        lm_head: returns the LM head's rows [.., H] for target ids [Vd] or all ids (None), for heads that share it.
    """

    name: str
    architectures: Sequence[str]
    layers: int
    lm_head: Callable[[Tensor | None], Tensor]


def export_head(
    head: EagleHead, directory: str | Path, to: str, target: ExportFacts, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Write a head in another program's format.

    Args:
        head: the head.
        directory: created if missing.
        to: "eagle", "vllm", "sglang" or "speculators".
        target: the target.
        dtype: data type of the stored weights.

    Returns:
        remarks for the user on differences in the other program

    Raises:
        CheckpointError: that format cannot express this head.
    """
    if to not in FORMATS:
        raise CheckpointError(f"unknown format {to!r}; known: {', '.join(FORMATS)}.")
    if reason := obstacle(head.config, to, target.layers):
        raise CheckpointError(f"a head of this kind cannot be written for {to}: {reason}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = (_eagle3_tensors if head.config.layout == "eagle3" else _eagle_tensors)(head, to, target)
    tensors = {name: (value.to(dtype) if value.is_floating_point() else value) for name, value in tensors.items()}
    with replacing(directory / SINGLE) as draft:
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        save_file(stored, draft, metadata={"format": "pt"})
    write_json(directory / CONFIG, _config(head.config, to, target, dtype), indent=2)
    if head.config.layout == "eagle3" or head.draft_ids is None:
        return []
    if to == "sglang":
        pickled = io.BytesIO()
        torch.save(head.draft_ids.long().cpu(), pickled)
        with replacing(directory / TOKEN_MAP) as draft:
            draft.write_bytes(pickled.getvalue())
        return [f"it drafts over its reduced vocabulary with --speculative-token-map {directory / TOKEN_MAP}"]
    return [f"{to} drafts over the whole vocabulary with heads of this layout; the weights are the same"]


def obstacle(config: EagleConfig, to: str, layers: int) -> str | None:
    """Return why a head cannot be written in a format, and an alternative; None if it can.

    ``layers``: the number of layers of the target.
    """
    for programs, test, reason in (_NOT_EAGLE3 if config.layout == "eagle3" else _NOT_EAGLE) + _NOT_SAFEAILAB:
        if to in programs.split() and (value := test(config, layers)):
            return reason.format(found=value, usual=usual_layers(layers))
    return None


def _of_fsd_alone(config: EagleConfig) -> str:
    names = ("input_norm", "final_norm", "feature_scale", "fused_layers")
    return ", ".join(name for name in names if getattr(config, name))


def _rope(config: EagleConfig) -> tuple[str, float, dict[str, Any]]:
    """Return (type of rotary positions, their base, further parameters)."""
    rope = dict(config.layer.get("rope_parameters") or {})
    return rope.pop("rope_type", "default"), rope.pop("rope_theta", 10000.0), rope


def _eagle_tensors(head: EagleHead, to: str, target: ExportFacts) -> dict[str, Tensor]:
    """The tensors, always with fc.bias: SGLang's bias stays random if the file has none."""
    state = {name: value for name, value in head.state_dict().items() if name != DRAFT_IDS}
    return {"fc.bias": torch.zeros(head.config.hidden_size), **state}


def _eagle3_tensors(head: EagleHead, to: str, target: ExportFacts) -> dict[str, Tensor]:
    layer = FIRST_LAYER if to == "speculators" else MIDLAYER
    tensors = {name.replace(FIRST_LAYER, layer): value for name, value in head.state_dict().items()}
    ids = tensors.pop(DRAFT_IDS, None)
    if head.lm_head is None:
        tensors[LM_HEAD] = target.lm_head(ids)
    if ids is not None:
        ids = ids.long().cpu()
        tensors[D2T] = ids - torch.arange(len(ids))
        tensors[T2D] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def _config(config: EagleConfig, to: str, target: ExportFacts, dtype: torch.dtype) -> dict[str, Any]:
    eagle3 = config.layout == "eagle3"
    common = {
        "architectures": [ARCHITECTURES[to][eagle3]],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
    }
    if not eagle3:
        biases = {"qkv_bias": True} if config.layer["model_type"] == "qwen2" else {}
        return {**_llama(config), **common, "target_model": target.name, "bias": config.fc_bias, **biases}
    # both numberings of layers, since engines differ by one: vLLM reads the top level, SGLang the nested config
    common |= {
        "target_hidden_size": config.target_hidden_size,
        **{name: getattr(config, name) for name in EAGLE3_FLAGS},  # defaults too, since theirs differ
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        AUX_IDS: [number + 1 for number in config.fused_layers],  # of the states that enter layers
    }
    if to != "speculators":
        nested = {AUX_IDS: config.fused_layers, "use_aux_hidden_state": True}
        return {**_llama(config), **common, "target_model": target.name, "bias": False, "eagle_config": nested}
    return {
        **common,
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [_GREEDY],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": _llama(config),
    }


def _llama(config: EagleConfig) -> dict[str, Any]:
    """The decoder layers as a Llama config in the older notation, which all programs read."""
    layer = {name: value for name, value in config.layer.items() if name != "rope_parameters"}
    rope_type, layer["rope_theta"], others = _rope(config)
    scaled = bool(others) or rope_type != "default"
    layer["rope_scaling"] = {"rope_type": rope_type, "type": rope_type, **others} if scaled else None
    defaults = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": layer["num_attention_heads"]}
    if layer["model_type"] == "qwen2":
        layer["model_type"] = "llama"
    sizes = {"num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size}
    return {**defaults, **layer, **sizes, "tie_word_embeddings": False}
