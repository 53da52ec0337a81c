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

from fsd_core.errors import CheckpointError, VocabularyMismatchError
from fsd_infer.drafters.session import DraftRequest
from fsd_infer.drafters.steps import HEADS, StepDrafter, StepSession
from fsd_infer.heads.kinds import HYDRA
from fsd_infer.heads.weights import Weights, fill
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
    """Hydra heads, each of which drafts one depth."""

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
        if len(table) != 2 or not count or not blocks or table[1] != target.hidden_size:
            raise CheckpointError(
                f"the Hydra heads in {directory} have LM heads of shape {list(table)}, and {target.name} has features "
                f"of {target.hidden_size}."
            )
        if table[0] != target.vocab_size:
            raise VocabularyMismatchError(
                f"the Hydra heads in {directory} draft over {table[0]} tokens, and {target.name} has "
                f"{target.vocab_size}. Use heads for this target."
            )
        grounded = bool(config.get("grounded_heads", False))
        with torch.device("meta"):
            made = HydraHeads(count, blocks, grounded, target.hidden_size, target.vocab_size)
        fill(made, weights, names, target.dtype)
        return cls(made.to(target.device), target, count, shape)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> HydraSession:
        return HydraSession(self, request)


class HydraSession(StepSession):
    """A session whose states are what the heads read, [B, E, (1 + depth)·H] above the nodes of a depth."""

    drafter: HydraDrafter

    def _begin(self, roots: Tensor) -> Tensor:
        return self.last_features[:, None]

    def _step(self, depth: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.drafter.head.grounded:
            state = torch.cat([state, self.drafter.target.embed(tokens)], -1)
        return self.drafter.head.logits(depth, state), state
