"""Draft with Hydra heads (arXiv 2402.05109) of the architecture "mlp".

A grounded head i reads the target's feature h and the embeddings of the newest token and of i drafts after it:

    x = [h ; E(t) ; E(d_1) ; … ; E(d_i)];  y = R x + SiLU(W x);  y ← y + SiLU(W_j y) for further blocks;  logits = U_i y

Heads that are not grounded read h alone, without R, as Medusa's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from fsd_core.errors import CheckpointError
from fsd_infer.drafters.steps import HEADS, StepDrafter, check_sizes, filled
from fsd_infer.heads.kinds import HYDRA
from fsd_infer.heads.weights import Weights
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape


class HydraBlock(nn.Module):
    """R x + SiLU(W x + b), [..., n·H] to [..., H]; R is the identity for n = 1."""

    def __init__(self, parts: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * size, size)
        self.res_connection = nn.Linear(parts * size, size) if parts > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + silu(self.linear(x))


class HydraHeads(nn.Module):
    """Parameters are named as in the authors' files."""

    def __init__(self, count: int, blocks: int, grounded: bool, size: int, vocabulary: int) -> None:
        super().__init__()
        self.grounded = grounded
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                HydraBlock(index + 2 if grounded else 1, size), *(HydraBlock(1, size) for _ in range(blocks - 1))
            )
            for index in range(count)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(size, vocabulary) for _ in range(count))

    def logits(self, index: int, x: Tensor) -> Tensor:
        """Return the logits [..., V] of head ``index`` for what it reads."""
        logits: Tensor = self.hydra_lm_head[index](self.hydra_mlp[index](x))
        return logits


@HEADS.register(HYDRA)
class HydraDrafter(StepDrafter):
    """Hydra heads, each of which drafts one depth.

    A node's state is what the heads read, [B, E, (1 + depth)·H] above the nodes of a depth.
    """

    name = "hydra"
    head: HydraHeads

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> HydraDrafter:
        kind, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
        if kind != "mlp" or offset:
            what = f"the architecture {kind!r:.60}" if kind != "mlp" else f"a hidden_state_offset of {offset!r:.60}"
            raise CheckpointError(f'the Hydra heads in {directory} have {what}: only "mlp" heads of the final feature.')
        weights, prefix = Weights(directory), "hydra_head."
        names = {stored.removeprefix(prefix): stored for stored in weights.shapes}
        count = len({name.split(".")[1] for name in names if name.startswith("hydra_lm_head.")})
        blocks = len({name.split(".")[2] for name in names if name.startswith("hydra_mlp.0.")})
        table = weights.shapes.get(names.get("hydra_lm_head.0.weight", ""), ())
        if len(table) != 2 or not blocks:
            raise CheckpointError(f"the Hydra heads in {directory} lack an MLP or an LM head, a table [V, H].")
        check_sizes(f"each of the Hydra heads in {directory}", table[1], table[0], target)
        grounded = bool(config.get("grounded_heads", False))
        with torch.device("meta"):
            made = HydraHeads(count, blocks, grounded, target.hidden_size, target.vocab_size)
        return cls(filled(made, weights, names, target), target, count, shape)

    def begin(self, features: Tensor) -> Tensor:
        return features[:, None]

    def step(self, depth: int, tokens: Tensor, state: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        if self.head.grounded:
            state = torch.cat([state, self.target.embed(tokens)], -1)
        return self.head.logits(depth, state), state
