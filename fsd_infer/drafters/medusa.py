"""Draft with Medusa heads (arXiv 2401.10774), in the layouts of their authors and of vLLM.

Head i estimates the token i + 2 places after the target's feature h, whatever lies between:

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

from fsd_core.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.steps import HEADS, StepDrafter, StepSession
from fsd_infer.heads.kinds import MEDUSA
from fsd_infer.heads.weights import Weights, fill
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

# The authors' "0.1.linear.weight", under several prefixes, and vLLM's "blocks.0.layers.1.weight": head and block.
_BLOCK = re.compile(r"(?:medusa_heads?\.|blocks\.)?(\d{1,3})\.(?:layers\.)?(\d{1,2})(?:\.linear)?\.(weight|bias)")
_LM_HEAD = re.compile(r"(?:lm_heads\.(\d{1,3})|lm_head)\.weight")


class MedusaHeads(nn.Module):
    """K heads of ``blocks`` residual blocks each, with an LM head [V, H] of their own or one for all."""

    def __init__(self, count: int, blocks: int, size: int, vocabulary: int, bias: bool, shared: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(blocks)) for _ in range(count)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocabulary, bias=False) for _ in range(1 if shared else count))

    def logits(self, place: int, features: Tensor) -> Tensor:
        """Return the logits [..., V] of head ``place`` for the target's features [..., H]."""
        part: Any = self.blocks[place]
        for block in part:
            features = features + silu(block(features))
        return self.lm_heads[min(place, len(self.lm_heads) - 1)](features)


@HEADS.register(MEDUSA)
class MedusaDrafter(StepDrafter):
    """Medusa heads, each of which drafts one depth."""

    name = "medusa"
    head: MedusaHeads

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> MedusaDrafter:
        if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
            raise CheckpointError(f"the Medusa heads in {directory} draft a truncated vocabulary, unknown here.")
        weights = Weights(directory)
        names = _names(directory, weights)
        heads = {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}
        layers = {int(name.split(".")[2]) for name in names if name.startswith("blocks.")}
        vocabulary, size = (*weights.shapes[names.get("lm_heads.0.weight", next(iter(names.values())))], 0, 0)[:2]
        if vocabulary != target.vocab_size:
            raise VocabularyMismatchError(
                f"the Medusa heads in {directory} draft over {vocabulary} tokens, and {target.name} has "
                f"{target.vocab_size}. Use heads for this target."
            )
        if size != target.hidden_size or not heads:
            raise CheckpointError(
                f"the Medusa heads in {directory} read {size} features, and {target.name} has {target.hidden_size}."
            )
        with torch.device("meta"):
            made = MedusaHeads(
                len(heads), len(layers), size, vocabulary, "blocks.0.0.bias" in names, "lm_heads.1.weight" not in names
            )
        fill(made, weights, names, target.dtype)
        return cls(made.to(target.device), target, len(heads), shape)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> MedusaSession:
        return MedusaSession(self, request)


class MedusaSession(StepSession):
    """A session without states of nodes: a depth's logits are those of its head."""

    drafter: MedusaDrafter

    def _begin(self, roots: Tensor) -> Tensor:
        return self.last_features.new_zeros(len(roots), 1, 0)

    def _step(self, depth: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.drafter.head.logits(depth, self.last_features)[:, None].expand(*tokens.shape, -1), state


def _names(directory: Path, weights: Weights) -> dict[str, str]:
    """Return the stored name of each tensor of :class:`MedusaHeads`.

    The authors number a head's LM head as its last block.
    """
    names, last = dict[str, str](), dict[str, str]()
    for stored, shape in weights.shapes.items():
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
