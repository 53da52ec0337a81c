"""How families of checkpoints name their multi-token-prediction layers, and what these layers compute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsd_core.errors import ModelLoadError
from fsd_infer.targets.target import Target


@dataclass(frozen=True)
class Layout:
    """How a family of checkpoints names MTP layers.

    Attributes:
        names: beginnings of tensors' names, with {layer} for the layer's number, and ours for them; the first that
            fits counts. Without {layer}, all layers share the tensor. Files may leave out or add "model." and the like
            before the names.
        families: ``model_type`` of the targets.
        follows: whether numbers go on from the target's own layers, else they begin at 0.
        state_first: whether the projection reads [state ; embedding] instead of [embedding ; state].
        normed: whether a norm follows the layer.
        config: fields of the target's config that the layers change, unless it has the field with "mtp_" before it;
            lists are repeated for each layer.
        rotates: whether the layers rotate queries and keys even where the target's own without a window do not.
        most: number of layers that are read, of those in the files; 0: all.
    """

    names: Mapping[str, str]
    families: tuple[str, ...]
    follows: bool = False
    state_first: bool = False
    normed: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    rotates: bool = False
    most: int = 0

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str]]:
        layer, result = re.escape("{layer}"), list[tuple[re.Pattern[str], str]]()
        for name, ours in self.names.items():
            escaped = re.escape(name.removeprefix("model.")).replace(layer, r"(\d+)")
            result.append((re.compile(rf"(?:(?:model|language_model|backbone)\.)*{escaped}"), ours))
        return result

    def part(self, stored: str) -> tuple[int | None, str] | None:
        """Return the layer's number (None: all) and our name of a tensor; None if it is not an MTP tensor."""
        for pattern, ours in self._patterns:
            match = pattern.match(stored)
            if match is not None:
                return int(match[1]) if match.groups() else None, ours + stored[match.end() :]
        return None

    def stored(self, ours: str, number: int) -> str:
        """Return the stored name of our ``ours`` of a layer, as :meth:`part` numbers it."""
        prefixes = [pair for pair in self.names.items() if ours.startswith(pair[1])]
        name, prefix = max(prefixes, key=lambda pair: len(pair[1]))
        return name.format(layer=number) + ours[len(prefix) :]


_DEEPSEEK, _MIMO, _LONGCAT = "model.layers.{layer}.", "model.mtp_layers.{layer}.", "model.mtp.layers.{layer}."
_QWEN = {
    "mtp.fc.": "eh_proj.", "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "norm.", "mtp.embed_tokens.": "embed_tokens.", "mtp.lm_head.": "lm_head.",
    "mtp.layers.{layer}.": "block.",
}  # fmt: skip
LAYOUTS = {
    "deepseek": Layout(
        {
            _DEEPSEEK + "embed_tokens.": "embed_tokens.", _DEEPSEEK + "shared_head.head.": "lm_head.",
            _DEEPSEEK + "enorm.": "enorm.", _DEEPSEEK + "hnorm.": "hnorm.", _DEEPSEEK + "eh_proj.": "eh_proj.",
            _DEEPSEEK + "shared_head.norm.": "norm.", _DEEPSEEK: "block.",
        },
        ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa", "glm_ocr_text"),
        follows=True,
        config={"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    ),
    "hunyuan": Layout(
        {
            _DEEPSEEK + "enorm.": "enorm.", _DEEPSEEK + "hnorm.": "hnorm.", _DEEPSEEK + "eh_proj.": "eh_proj.",
            _DEEPSEEK + "final_layernorm.": "norm.", _DEEPSEEK + "mlp.router.gate.": "block.mlp.gate.",
            _DEEPSEEK + "mlp.expert_bias": "block.mlp.e_score_correction_bias",
            _DEEPSEEK + "mlp.shared_mlp.": "block.mlp.shared_experts.", _DEEPSEEK: "block.",
        },
        ("hy_v3",),
        follows=True,
        config={"mlp_layer_types": ["sparse"]},
    ),
    "qwen": Layout(
        _QWEN,
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        config={"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "mimo": Layout(
        {
            _MIMO + "token_layernorm.": "enorm.", _MIMO + "hidden_layernorm.": "hnorm.",
            _MIMO + "input_proj.": "eh_proj.", _MIMO + "final_layernorm.": "norm.", _MIMO: "block.",
        },
        ("mimo",),
        state_first=True,
        config={"layer_types": ["full_attention"]},
    ),
    "ernie": Layout(
        {
            "model.mtp_emb_norm.{layer}.": "enorm.", "model.mtp_hidden_norm.{layer}.": "hnorm.",
            "model.mtp_linear_proj.{layer}.": "eh_proj.", "model.mtp_block.{layer}.": "block.",
        },
        ("ernie4_5_moe",),
        normed=False,
        config={"moe_layer_start_index": 1 << 20},
    ),
    "longcat": Layout(
        {
            "model.mtp.embed_tokens.": "embed_tokens.", "model.mtp.norm.": "norm.",
            _LONGCAT + "enorm.m.": "enorm.", _LONGCAT + "hnorm.m.": "hnorm.", _LONGCAT + "eh_proj.": "eh_proj.",
            _LONGCAT + "transformer_layer.mlp.": "block.mlp.", _LONGCAT: "block.",
        },
        ("longcat_flash",),
    ),
    "mimo_v2": Layout(  # like vLLM, read only the first layer: sources differ on what the others read
        {
            _LONGCAT + "enorm.": "enorm.", _LONGCAT + "hnorm.": "hnorm.", _LONGCAT + "eh_proj.": "eh_proj.",
            _LONGCAT + "final_layernorm.": "norm.", _LONGCAT + "pre_mlp_layernorm.": "block.post_attention_layernorm.",
            _LONGCAT + "self_attn.attention_sink_bias": "block.self_attn.sinks", _LONGCAT: "block.",
        },
        ("mimo_v2_flash",),
        config={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        most=1,
    ),
    "mellum": Layout(
        _QWEN, ("mellum",), config={"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]}
    ),
    "exaone": Layout(
        _QWEN,
        ("exaone4", "exaone_moe"),
        config={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        rotates=True,
    ),
    "nemotron": Layout(  # a layer is two blocks, each with one norm
        {
            "mtp.layers.0.enorm.": "enorm.", "mtp.layers.0.hnorm.": "hnorm.", "mtp.layers.0.eh_proj.": "eh_proj.",
            "mtp.layers.1.final_layernorm.": "norm.", "mtp.layers.": "block.", "mtp.embed_tokens.": "embed_tokens.",
            "mtp.lm_head.": "lm_head.",
        },
        ("nemotron_h",),
        config={"layers_block_type": ["full_attention", "moe"]},
        most=1,
    ),
}  # fmt: skip
_SPECULATORS = "mtp_layers.{layer}."
OWN_DIRECTORY = {  # speculators' names, for a layer in a directory of its own
    _SPECULATORS + "token_layernorm.": "enorm.", _SPECULATORS + "hidden_layernorm.": "hnorm.",
    _SPECULATORS + "input_proj.": "eh_proj.", _SPECULATORS + "final_layernorm.": "norm.", _SPECULATORS: "block.",
}  # fmt: skip


def family_layout(target: Target) -> Layout | None:
    """Return the layout of the target's family; None if there is none."""
    return next((layout for layout in LAYOUTS.values() if target.config.model_type in layout.families), None)


def separate_layout(target: Target) -> Layout:
    """Return speculators' layout with the layers that the target's family has, or its last ones with attention."""
    family = family_layout(target)
    config = {"layer_types": ["full_attention"]} if family is None else family.config
    return Layout(OWN_DIRECTORY, (), normed=family is None or family.normed, config=config)


def layout_of(target: Target, name: str) -> Layout:
    """Return the layout of the target's family. Raises ModelLoadError, which names a tensor, if there is none."""
    layout = family_layout(target)
    if layout is None:
        families = ", ".join(family for entry in LAYOUTS.values() for family in entry.families)
        raise ModelLoadError(
            f"{target.name} has MTP layers in the layout of {target.config.model_type} ({name}), which is not "
            f"read: what such layers compute is not known here. Name another drafter. Known layouts: {families}."
        )
    return layout
