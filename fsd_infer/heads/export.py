"""Heads as other programs read them: SafeAILab's EAGLE, vLLM, SGLang, speculators. :mod:`.public` is the way back.

A format that cannot express a head refuses it, with the reason and the nearest thing that can be had.
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

from fsd_infer.errors import CheckpointError
from fsd_infer.files import replacing, write_json
from fsd_infer.heads import FORMATS
from fsd_infer.heads.config import EagleConfig, entering_ids, usual_layers
from fsd_infer.heads.head import EagleHead
from fsd_infer.heads.public import AUX_IDS, D2T, LM_HEAD, T2D
from fsd_infer.heads.weights import SINGLE

TOKEN_MAP = "hot_token_ids.pt"  # what SGLang's --speculative-token-map takes
_SPECULATED = 5  # tokens per round that a speculators config proposes


@dataclass(frozen=True)
class TargetFacts:
    """What a format wants to know of the target.

    Attributes:
        name: how an engine finds it: directory or hub id.
        architectures: of its config.
        layers: how many it has.
        lm_head: its rows for target ids [Vd] or all of them (None), [.., H]; for heads that share it.
    """

    name: str
    architectures: Sequence[str]
    layers: int
    lm_head: Callable[[Tensor | None], Tensor]


def export_head(
    head: EagleHead, directory: str | Path, to: str, target: TargetFacts, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Write a head as another program reads it.

    Args:
        head: the head.
        directory: created if missing.
        to: "eagle", "vllm", "sglang" or "speculators".
        target: the target.
        dtype: of the stored weights.

    Returns:
        remarks for the user: what the other program does otherwise

    Raises:
        CheckpointError: that format cannot express this head.
    """
    if to not in FORMATS:
        raise CheckpointError(f"unknown format {to!r}; known: {', '.join(FORMATS)}.")
    if reason := obstacle(head.config, to, target.layers):
        raise CheckpointError(f"a head of this kind cannot be written for {to}: {reason}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    eagle3 = head.config.layout == "eagle3"
    tensors = _eagle3_tensors(head, to, target) if eagle3 else _eagle_tensors(head)
    config = _speculators(head.config, target, dtype) if to == "speculators" else _llama(head.config, to, target, dtype)
    tensors = {name: (value.to(dtype) if value.is_floating_point() else value) for name, value in tensors.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    with replacing(directory / SINGLE) as draft:
        save_file(tensors, draft, metadata={"format": "pt"})
    write_json(directory / "config.json", config, indent=2)
    if eagle3 or head.draft_ids is None:
        return []
    if to == "sglang":
        pickled = io.BytesIO()
        torch.save(head.draft_ids.long().cpu(), pickled)
        with replacing(directory / TOKEN_MAP) as draft:
            draft.write_bytes(pickled.getvalue())
        return [f"it drafts over its reduced vocabulary with --speculative-token-map {directory / TOKEN_MAP}"]
    return [f"{to} drafts over the whole vocabulary with heads of this layout; the weights are the same"]


def obstacle(config: EagleConfig, to: str, layers: int) -> str | None:
    """Why a head cannot be written in a format, and what can; None if it can. ``layers``: how many the target has."""
    kind, size = config.layer["model_type"], config.hidden_size
    width = config.layer.get("head_dim", size // config.layer["num_attention_heads"])
    rope = (config.layer.get("rope_parameters") or {}).get("rope_type", "default")
    if config.layout == "fsd":
        used = [name for name in ("input_norm", "final_norm", "feature_scale") if getattr(config, name)]
        used += ["fused_layers"] if config.fused_layers else []
        if used:
            return f"no other program knows {', '.join(used)} of layout fsd. Train one with head.layout: eagle3."
    if config.layout != "eagle3":
        if to == "speculators":
            return "speculators has no EAGLE-1/2 heads any more. Use --to vllm, or train one with head.layout: eagle3."
        if config.embed_size != size:
            return "embeddings and features must be equally wide there."
        if kind != "llama" and not (kind == "qwen2" and to == "eagle"):
            return f"its layer is {kind}'s, there it is Llama's. Train one with head.layer: llama."
        if config.fc_bias and to == "vllm":
            return "vLLM has no bias in fc. Use --to eagle or sglang, or train one with head.fc_bias: false."
    elif to in ("eagle", "sglang"):
        others = "--to vllm or speculators"
        if kind != "llama":
            return f"its layer is {kind}'s, there it is Llama's. Use {others}."
        if config.num_layers > 1:
            return f"it has {config.num_layers} layers, there is one. Use {others}."
        if config.norm_before_residual:
            return f"norm_before_residual is unknown there. Use {others}."
        if len(config.fused_layers) != 3:
            return f"it fuses {len(config.fused_layers)} layers, there are always three. Use {others}."
        if to == "eagle" and (config.fc_norm or config.norm_output):
            return "fc_norm and norm_output are unknown to SafeAILab's code. Use --to vllm, sglang or speculators."
        if to == "eagle" and config.fused_layers != usual_layers(layers):
            return (
                f"SafeAILab's code always fuses layers {usual_layers(layers)}, this one {config.fused_layers} "
                "(numbers from 0). Use --to vllm, sglang or speculators."
            )
    if to == "eagle":
        if rope not in ("default", "linear", "dynamic"):
            return f"SafeAILab's code does not know positions of type {rope}. Use --to vllm or sglang."
        if width * config.layer["num_attention_heads"] != size:
            return "SafeAILab's code takes hidden_size / num_attention_heads as head_dim. Use --to vllm or sglang."
    return None


def _eagle_tensors(head: EagleHead) -> dict[str, Tensor]:
    """fc.bias is always there: SGLang's code has one, which stays random where the file does not."""
    state = {name: value for name, value in head.state_dict().items() if name != "draft_ids"}
    return {"fc.bias": torch.zeros(head.config.hidden_size), **state}


def _eagle3_tensors(head: EagleHead, to: str, target: TargetFacts) -> dict[str, Tensor]:
    layer = "layers.0." if to == "speculators" else "midlayer."
    ids = head.draft_ids
    tensors = {
        name.replace("layers.0.", layer): value for name, value in head.state_dict().items() if name != "draft_ids"
    }
    if head.lm_head is None:
        tensors[LM_HEAD] = target.lm_head(ids)
    if ids is not None:
        ids = ids.long().cpu()
        tensors[D2T] = ids - torch.arange(len(ids))
        tensors[T2D] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def _llama(config: EagleConfig, to: str, target: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
    """The config of a Llama model of as many layers, with what the formats add."""
    values = {**_layer(config), "torch_dtype": str(dtype).removeprefix("torch."), "target_model": target.name}
    if config.layout != "eagle3":
        architecture = "LlamaForCausalLMEagle" if to == "sglang" else "LlamaForCausalLM"
        biases = {"qkv_bias": True} if config.layer["model_type"] == "qwen2" else {}
        return {"architectures": [architecture], **values, "bias": config.fc_bias, **biases}
    # both numberings of layers, since engines differ by one: vLLM reads the top level, SGLang what is nested
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **values,
        "bias": False,
        **_eagle3_options(config),
        AUX_IDS: entering_ids(config.fused_layers),
        "eagle_config": {AUX_IDS: config.fused_layers, "use_aux_hidden_state": True},
    }


def _speculators(config: EagleConfig, target: TargetFacts, dtype: torch.dtype) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": _SPECULATED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": _layer(config),
        **_eagle3_options(config),
        AUX_IDS: entering_ids(config.fused_layers),
        "norm_before_fc": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
    }


def _eagle3_options(config: EagleConfig) -> dict[str, Any]:
    return {
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,  # vLLM takes true for a speculators config without
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _layer(config: EagleConfig) -> dict[str, Any]:
    """The decoder's layers in the older spelling, which all programs read."""
    layer = {name: value for name, value in config.layer.items() if name != "rope_parameters"}
    rope = dict(config.layer.get("rope_parameters") or {})
    layer["rope_theta"] = rope.pop("rope_theta", 10000.0)
    kind = rope.pop("rope_type", "default")
    layer["rope_scaling"] = None if kind == "default" else {"rope_type": kind, "type": kind, **rope}
    defaults = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": layer["num_attention_heads"]}
    if layer["model_type"] == "qwen2":
        layer["model_type"] = "llama"
    sizes = {"num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size}
    return {**defaults, **layer, **sizes, "tie_word_embeddings": False}
