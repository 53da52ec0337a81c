"""Draft with Medusa heads (arXiv 2401.10774), in the layouts of their authors, text-generation-inference and vLLM.

Head i estimates the token i + 2 positions after the target's feature h, whatever lies between:

    y = h;  y ← y + SiLU(W_ij y + b_ij) for each of its blocks j;  logits = U_i y
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from fsd_core.errors import CheckpointError
from fsd_infer.drafters.steps import HEADS, StepDrafter, check_sizes, filled
from fsd_infer.heads.kinds import MEDUSA
from fsd_infer.heads.weights import MEDUSA_FILE, SINGLE, Weights
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

# The authors' "0.1.linear.weight", under several prefixes, and vLLM's "blocks.0.layers.1.weight": head and block.
_BLOCK = re.compile(r"(?:medusa_heads?\.|blocks\.)?(\d{1,3})\.(?:layers\.)?(\d{1,2})(?:\.linear)?\.(weight|bias)")
_LM_HEAD = re.compile(r"(?:lm_heads\.(\d{1,3})|lm_head)\.weight")


class MedusaHeads(nn.Module):
    """Residual blocks on the target's features, and LM heads.

    Args:
        count: K, number of heads.
        blocks: number of residual blocks of each.
        size: H.
        vocabulary: V.
        bias: of the blocks.
        lm_heads: number of LM heads [V, H]: K, 1 for all, or 0 for the target's.
    """

    def __init__(self, count: int, blocks: int, size: int, vocabulary: int, bias: bool, lm_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(blocks)) for _ in range(count)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocabulary, bias=False) for _ in range(lm_heads))

    def logits(self, index: int, features: Tensor, target: Target) -> Tensor:
        """Return the logits [..., V] of head ``index`` for the target's features [..., H]."""
        blocks: Any = self.blocks[index]
        for block in blocks:
            features = features + silu(block(features))
        if not self.lm_heads:
            return target.lm_logits(features)
        return self.lm_heads[min(index, len(self.lm_heads) - 1)](features)


@HEADS.register(MEDUSA)
class MedusaDrafter(StepDrafter):
    """Medusa heads, each of which drafts one depth. Nodes have no state: a depth's logits are those of its head."""

    name = "medusa"
    head: MedusaHeads

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> MedusaDrafter:
        if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
            raise CheckpointError(f"the Medusa heads in {directory} draft a truncated vocabulary, unknown here.")
        weights = Weights(directory, single=MEDUSA_FILE if (directory / MEDUSA_FILE).is_file() else SINGLE)
        names = _names(directory, weights)
        heads = {int(name.split(".")[1]) for name in names}
        layers = {int(name.split(".")[2]) for name in names if name.startswith("blocks.")}
        lm_heads, (vocabulary, size) = _sizes(names, weights, target)
        check_sizes(f"each of the Medusa heads in {directory}", size, vocabulary, target)
        if lm_heads not in (0, 1, len(heads)):
            raise CheckpointError(
                f"the Medusa heads in {directory} are {len(heads)} with {lm_heads} LM heads: each has one, or all "
                "share one, or the target's. Copy them again."
            )
        with torch.device("meta"):
            made = MedusaHeads(len(heads), len(layers), size, vocabulary, "blocks.0.0.bias" in names, lm_heads)
        return cls(filled(made, weights, names, target), target, len(heads), shape)

    def begin(self, features: Tensor) -> Tensor:
        return features.new_zeros(len(features), 1, 0)

    def step(self, depth: int, tokens: Tensor, state: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(depth, features, self.target)
        return logits[:, None].expand(*tokens.shape, -1), state


def _sizes(names: Mapping[str, str], weights: Weights, target: Target) -> tuple[int, tuple[int, int]]:
    """Return the number of LM heads, and (V, H); (0, (V of the target, H)) if there are none."""
    lm_heads = sum(name.startswith("lm_heads.") for name in names)
    first = names.get("lm_heads.0.weight") or names.get("blocks.0.0.weight", "")
    vocabulary, size = (*weights.shapes.get(first, ()), 0, 0)[:2]
    return lm_heads, (vocabulary if lm_heads else target.vocab_size, size)


def _names(directory: Path, weights: Weights) -> dict[str, str]:
    """Return the stored name of each tensor of :class:`MedusaHeads`.

    The authors number a head's LM head as its last block.
    """
    names, last = dict[str, str](), dict[str, str]()
    inside = any(stored.startswith("medusa_head") for stored in weights.shapes)  # a model with heads: Medusa-2
    for stored, shape in weights.shapes.items():
        if inside and not stored.startswith("medusa_head"):
            continue
        if found := _LM_HEAD.fullmatch(stored):
            names[f"lm_heads.{found[1] or 0}.weight"] = stored
        elif (found := _BLOCK.fullmatch(stored)) and (len(shape) != 2 or ".linear." in stored or "blocks." in stored):
            names[f"blocks.{found[1]}.{found[2]}.{found[3]}"] = stored
        elif found:
            last[f"lm_heads.{found[1]}.weight"] = stored
        elif stored != "token_map":
            raise CheckpointError(f"the Medusa heads in {directory} have {stored}, which is not known here.")
        else:
            raise CheckpointError(f"the Medusa heads in {directory} draft a reduced vocabulary (token_map).")
    return names | last
