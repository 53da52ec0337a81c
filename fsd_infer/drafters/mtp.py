"""Draft with the multi-token-prediction layer of the target's own checkpoint (DeepSeek-V3, arXiv 2412.19437, 2.2).

The layer reads the pair of a token i+1 and the target's final state at i, both normed. Its output g_i, after a norm of
its own, gives the LM head's input for token i+2 and stands for the state at i+1 in the next step. So the states are
normed at the first step and at all later ones, and one layer, used again at each depth, grows trees as an EAGLE head
does: siblings read their parent's g. ERNIE-4.5 alone has no norm after its layer.

transformers drops the layer's tensors when it loads the target, so they are read from its files.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import cached_file

from fsd_core.errors import CheckpointError, FsdError, ModelLoadError
from fsd_infer.device.cache import cache_argument
from fsd_infer.drafters.base import DRAFTERS, Drafter
from fsd_infer.drafters.eagle import EagleDrafter
from fsd_infer.heads.layers import mask_for
from fsd_infer.heads.weights import Weights, has_weights
from fsd_infer.targets.checks import is_mtp_name
from fsd_infer.targets.stack import StackOwner
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """How a family of checkpoints names an MTP layer.

    Attributes:
        names: regular expressions of tensors' names with a group ``layer``, and our prefix for what matches; "" drops
            copies of the target's own tensors.
        families: ``model_type`` of the targets.
        state_first: whether the projection reads [state ; embedding] instead of [embedding ; state].
        normed: whether a norm follows the layer.
        config: fields of the target's config that the layer changes.
    """

    names: Mapping[str, str]
    families: tuple[str, ...]
    state_first: bool = False
    normed: bool = True
    config: Mapping[str, Any] | None = None

    def part(self, name: str) -> tuple[int, str] | None:
        """Return the number of the layer and our name of a tensor ("" to drop it); None if it is no MTP tensor."""
        for pattern, ours in self.names.items():
            found = re.match(pattern, name)
            if found is not None:
                number = int(found.groupdict().get("layer") or 0)
                return number, ours + name[found.end() :] if ours else ""
        return None


_DEEPSEEK = r"model\.layers\.(?P<layer>\d+)\."
_MIMO = r"model\.mtp_layers\.(?P<layer>\d+)\."
_LONGCAT = r"model\.mtp\.layers\.(?P<layer>\d+)\."
LAYOUTS = {
    "deepseek": Layout(
        {
            _DEEPSEEK + r"(embed_tokens|shared_head\.head)\.": "",
            _DEEPSEEK + r"enorm\.": "enorm.",
            _DEEPSEEK + r"hnorm\.": "hnorm.",
            _DEEPSEEK + r"eh_proj\.": "eh_proj.",
            _DEEPSEEK + r"shared_head\.norm\.": "norm.",
            _DEEPSEEK: "block.",
        },
        ("deepseek_v3", "glm4_moe", "glm4_moe_lite"),
        config={"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
    ),
    "mimo": Layout(
        {
            _MIMO + r"token_layernorm\.": "enorm.",
            _MIMO + r"hidden_layernorm\.": "hnorm.",
            _MIMO + r"input_proj\.": "eh_proj.",
            _MIMO + r"final_layernorm\.": "norm.",
            _MIMO: "block.",
        },
        ("mimo",),
        state_first=True,
    ),
    "ernie": Layout(
        {
            r"model\.mtp_emb_norm\.(?P<layer>\d+)\.": "enorm.",
            r"model\.mtp_hidden_norm\.(?P<layer>\d+)\.": "hnorm.",
            r"model\.mtp_linear_proj\.(?P<layer>\d+)\.": "eh_proj.",
            r"model\.mtp_block\.(?P<layer>\d+)\.": "block.",
        },
        ("ernie4_5_moe",),
        normed=False,
        config={"moe_layer_start_index": 1},
    ),
    "longcat": Layout(
        {
            r"model\.mtp\.embed_tokens\.": "",
            r"model\.mtp\.norm\.": "norm.",
            _LONGCAT + r"enorm\.m\.": "enorm.",
            _LONGCAT + r"hnorm\.m\.": "hnorm.",
            _LONGCAT + r"eh_proj\.": "eh_proj.",
            _LONGCAT + r"transformer_layer\.mlp\.": "block.mlp.",
            _LONGCAT: "block.",
        },
        ("longcat_flash",),
    ),
}


class _PlainBlock(nn.Module):
    """LongCat's MTP layer: one attention and one dense MLP, while its decoder layers hold two of each and experts."""

    def __init__(self, layer: Any, config: Any) -> None:
        super().__init__()
        self.self_attn = type(layer.self_attn[0])(config, 0)
        self.mlp = type(layer.mlps[0])(config)
        norms = (type(layer.input_layernorm[0])(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor, cache: Any = None, **others: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache=cache, **others)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class MtpHead(nn.Module):
    """An MTP layer with what :class:`EagleDrafter` asks of a head.

    Args:
        target: the model of whose layers' class it is.
        layout: of the family.
    """

    draft_ids = lm_head = None

    def __init__(self, target: Target, layout: Layout) -> None:
        super().__init__()
        width, config = target.hidden_size, copy.deepcopy(target.config)
        for name, value in (layout.config or {}).items():
            if hasattr(config, name):
                setattr(config, name, value)
        last: Any = _layers(target)[-1]
        self.block = (
            _PlainBlock(last, config) if isinstance(last.input_layernorm, nn.ModuleList) else type(last)(config, 0)
        )
        norm = type(self.block.input_layernorm)
        self.enorm, self.hnorm = (norm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.norm = norm(width, eps=config.rms_norm_eps) if layout.normed else nn.Identity()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.state_first = layout.state_first
        self.config = SimpleNamespace(hidden_size=width, num_layers=1, fused_layers=(), draft_vocab_size=None)
        self._rotary: tuple[Any, ...] = (target.decoder.rotary_emb,)  # the target's, no part of this module

    def forward(self, embeds: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Return g [B, M, H] of pairs of embeddings [B, M, H] and states [B, M, H]; arguments as in EagleHead."""
        pair = [self.enorm(embeds.to(states.dtype)), self.hnorm(states)]
        x = self.eh_proj(torch.cat(pair[::-1] if self.state_first else pair, -1))
        given: dict[str, Any] = {cache_argument(type(self.block)): cache, "position_ids": positions}
        given["attention_mask"] = mask_for(nn.ModuleList([self.block]), mask, x.dtype)
        x = self.block(x, position_embeddings=self._rotary[0](x, positions), **given)
        made: Tensor = self.norm(x[0] if isinstance(x, tuple) else x)
        return made

    def cast(self, dtype: torch.dtype) -> MtpHead:
        """Convert the parameters alone, as :meth:`EagleHead.cast`."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def readout(self, outputs: Tensor) -> Tensor:
        return outputs

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        return target.embed(ids)


def read_layer(target: Target) -> tuple[Layout, dict[str, Tensor]]:
    """Read the target's first MTP layer: its layout, and tensors by our names.

    Raises:
        ModelLoadError: there is no MTP layer, or one of a layout that is not read.
        CheckpointError: a damaged file, or quantised tensors.
    """
    names, directory = mtp_names(target), files_of(target)
    if not names or directory is None:
        raise ModelLoadError(
            f"{target.name} has no MTP layer in its files. Name another drafter, or load the checkpoint as published."
        )
    layout, weights = _layout_of(target, names), Weights(directory)
    first = len(_layers(target)) if layout is LAYOUTS["deepseek"] else 0
    state, others = {}, set()
    for name in names:
        number, ours = layout.part(name) or (first, f"unknown.{name}")
        if number > first:
            others.add(number)
        elif ours:
            state[ours] = weights.read(name)
    if others:
        logger.warning("%s has %d MTP layers: the first drafts all tokens.", target.name, 1 + len(others))
    return layout, _fused_experts(state)


def drafts_by_default(target: Target) -> bool:
    """Whether the target's files have an MTP layer that is read; says in a line if so, or why it is not used."""
    try:
        names = mtp_names(target)
        if names:
            _layout_of(target, names)
    except FsdError as error:
        logger.warning("%s", error)
        return False
    if names:
        logger.warning('%s drafts by the MTP layer of its checkpoint (drafter="mtp").', target.name)
    return bool(names)


def mtp_names(target: Target) -> list[str]:
    """Return the names of tensors of MTP layers in the target's files. Raises CheckpointError."""
    directory = files_of(target)
    names = [] if directory is None else Weights(directory).shapes
    return [name for name in names if is_mtp_name(name, len(_layers(target)))]


def _layout_of(target: Target, names: list[str]) -> Layout:
    layout = next((one for one in LAYOUTS.values() if target.config.model_type in one.families), None)
    if layout is None:
        known = ", ".join(family for one in LAYOUTS.values() for family in one.families)
        raise ModelLoadError(
            f"{target.name} has MTP layers in the layout of {target.config.model_type} ({names[0]}), which is not "
            f"read. Name another drafter. Known layouts: {known}."
        )
    return layout


def _layers(target: Target) -> Any:
    return getattr(target.decoder, "layers", ())  # LongCat counts two in its config for each


def files_of(target: Target) -> Path | None:
    """Return the directory of the target's safetensors; None for a model made in memory, or of another format."""
    source = getattr(target.model, "name_or_path", "") or ""
    if not source:
        return None
    directory = Path(source)
    if not directory.is_dir():
        config = cached_file(source, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
        directory = Path(config).parent if config else directory
    return directory if directory.is_dir() and has_weights(directory) else None


def _fused_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join tensors of single experts as transformers' layers hold them: gate_up_proj [E, 2I, H], down_proj."""
    pattern = re.compile(r"block\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
    found = [match for name in state if (match := pattern.fullmatch(name))]
    parts = {(int(match[1]), match[2]): state.pop(match[0]) for match in found}
    numbers = sorted({number for number, _ in parts})
    if numbers:
        both = [torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in numbers]
        state["block.mlp.experts.gate_up_proj"] = torch.stack(both)
        state["block.mlp.experts.down_proj"] = torch.stack([parts[n, "down"] for n in numbers])
    return state


@DRAFTERS.register("mtp")
class MtpDrafter(EagleDrafter):
    """The MTP layer of the target's own checkpoint, used again at every depth; arguments as of EagleDrafter."""

    name = "mtp"

    @classmethod
    def load(cls, name: str | Path, target: Target, tree: TreeShape | None) -> Drafter | None:
        return cls.of(target, tree) if name == cls.name else None

    @classmethod
    def of(cls, target: Target, tree: TreeShape | None = None) -> MtpDrafter:
        """Read the layer from the target's files.

        Raises:
            ModelLoadError: the target has no MTP layer, or one of a layout that is not read.
            CheckpointError: tensors are missing, do not fit, or are quantised.
        """
        layout, state = read_layer(target)
        head: Any = MtpHead(target, layout)
        own = head.state_dict()
        odd = [n for n in own.keys() | state.keys() if n not in own or n not in state or own[n].shape != state[n].shape]
        if odd:
            raise CheckpointError(f"{target.name}: its MTP layer does not fit, first at {min(odd)}. Fetch it again.")
        head.load_state_dict(state)
        made = cls(head.requires_grad_(False), target, tree)
        made.public = True
        return made

    def stack_owners(self) -> list[StackOwner]:
        return []  # no backend has these layers
