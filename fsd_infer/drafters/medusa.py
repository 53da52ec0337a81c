"""Draft with Medusa heads (arXiv 2401.10774), in the layouts of their authors, text-generation-inference and vLLM, and
with Hydra heads (arXiv 2402.05109) of the architecture "mlp".

Medusa's head i estimates the token i + 2 positions after the target's feature h, whatever lies between:

    y = h;  y ← y + SiLU(W_ij y + b_ij) for each of its blocks j;  logits = U_i y

Hydra's also reads the embeddings of the newest token and of i drafts after it, if it is grounded. Then the first block
begins with them, and has a projection R in place of the identity:

    x = [h ; E(t) ; E(d_1) ; … ; E(d_i)];  y = R x + SiLU(W_i0 x + b_i0)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from fsd_core.errors import CheckpointError
from fsd_infer.drafters.steps import HEADS, StepDrafter, filled
from fsd_infer.heads.kinds import HYDRA, MEDUSA
from fsd_infer.heads.stored_parts import check_draft_ids, check_sizes_agree, check_uncomputed, flag, our_name
from fsd_infer.heads.weights import AGAIN, INTEGERS, MEDUSA_FILE, SINGLE, Weights, check_sizes
from fsd_infer.targets.checks import QUANTISED
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

# The authors' "0.1.linear.weight", under several prefixes, and vLLM's "blocks.0.layers.1.weight": head and block.
_BLOCK = re.compile(r"(?:medusa_heads?\.|blocks\.)?(\d{1,3})\.(?:layers\.)?(\d{1,2})(?:\.linear)?\.(weight|bias)")
_LM_HEAD = re.compile(r"(?:lm_heads\.(\d{1,3})|lm_head)\.weight")
_OF_HYDRA = {"hydra_head.": "", "hydra_mlp.": "blocks.", "hydra_lm_head.": "lm_heads."}
_TOKEN_MAP = "token_map"  # vLLM's, of a reduced vocabulary


class ResidualBlock(nn.Module):
    """R x + SiLU(W x + b), [..., n·H] to [..., H]; R is the identity for n = 1."""

    def __init__(self, parts: int, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * size, size, bias=bias)
        self.res_connection = nn.Linear(parts * size, size) if parts > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + silu(self.linear(x))


class MedusaHeads(nn.Module):
    """Residual blocks, and LM heads.

    Args:
        count: K, number of heads.
        blocks: number of residual blocks of each.
        size: H.
        vocabulary: V.
        lm_heads: number of LM heads [V, H]: K, 1 for all, or 0 for the target's.
        biases: whether blocks and LM heads have biases.
        grounded: whether heads read drafts, as grounded ones of Hydra.
    """

    def __init__(
        self,
        count: int,
        blocks: int,
        size: int,
        vocabulary: int,
        lm_heads: int,
        biases: tuple[bool, bool],
        grounded: bool = False,
    ) -> None:
        super().__init__()
        firsts = [index + 2 if grounded else 1 for index in range(count)]  # what the first blocks read, in H
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(parts, size, biases[0]) for parts in [first, *[1] * blocks][:blocks]))
            for first in firsts
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, vocabulary, bias=biases[1]) for _ in range(lm_heads))
        self.grounded = grounded

    def keep_rows(self, ids: Tensor) -> None:
        """Keep these rows [Vd] of the LM heads; some files have no others."""
        for part in self.lm_heads:
            head: Any = part
            if len(head.weight) != len(ids):
                head.weight = nn.Parameter(head.weight[ids.to(head.weight.device)], requires_grad=False)

    def logits(self, index: int, x: Tensor, target: Target) -> Tensor:
        """Return the logits [..., V] of head ``index`` for what it reads."""
        x = self.blocks[index](x)
        if not self.lm_heads:
            return target.lm_logits(x)
        return self.lm_heads[min(index, len(self.lm_heads) - 1)](x)


@HEADS.register(MEDUSA)
class MedusaDrafter(StepDrafter):
    """Medusa heads, each of which drafts one depth. Nodes have no state: a depth's logits are those of its head."""

    name = "medusa"
    head: MedusaHeads

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> MedusaDrafter:
        if config.get("model_type") in (None, "medusa"):  # else the config is the target's
            check_uncomputed(config.get)
        weights = Weights(directory, single=MEDUSA_FILE if (directory / MEDUSA_FILE).is_file() else SINGLE)
        names = _names(directory, weights)
        if flag(config.get, "original_lm_head"):  # vLLM's: the first LM head serves all
            names = {name: stored for name, stored in names.items() if not re.match(r"lm_heads\.[1-9]", name)}
        heads = {int(name.split(".")[1]) for name in names}
        layers = {int(name.split(".")[2]) for name in names if name.startswith("blocks.")}
        lm_heads = sum(name.startswith("lm_heads.") for name in names)
        first = next((name for name in names if name.startswith("lm_heads.")), "blocks.0.0.linear.weight")
        rows, size = (*weights.shapes.get(names.get(first, ""), ()), 0, 0)[:2]
        rows = rows if lm_heads else target.vocab_size  # theirs are the target's
        ids = _draft_ids(config, weights, rows, target.vocab_size) if lm_heads else None
        vocabulary = rows if ids is None else config.get("vocab_size", target.vocab_size)
        check_sizes(f"each of the Medusa heads in {directory}", size, vocabulary, target)
        if lm_heads not in (0, 1, len(heads)):
            raise CheckpointError(
                f"the Medusa heads in {directory} are {len(heads)} with {lm_heads} LM heads: each has one, or all "
                "share one, or the target's. Copy them again."
            )
        with torch.device("meta"):
            biases = "blocks.0.0.linear.bias" in names or flag(config.get, "medusa_fc_bias"), False
            head = MedusaHeads(len(heads), len(layers), size, rows, lm_heads, biases)
        head = filled(head, weights, names, target)
        if ids is None:
            return cls(head, target, len(heads), shape)
        head.keep_rows(ids)
        return cls(head, target, len(heads), shape, ids.to(target.device))

    def begin(self, features: Tensor) -> Tensor:
        return features.new_zeros(len(features), 1, 0)

    def step(self, depth: int, tokens: Tensor, state: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(depth, features, self.target)
        return logits[:, None].expand(*tokens.shape, -1), state


@HEADS.register(HYDRA)
class HydraDrafter(StepDrafter):
    """Hydra heads, each of which drafts one depth.

    A node's state is what the heads read, [B, E, (1 + depth)·H] above the nodes of a depth.
    """

    name = "hydra"
    head: MedusaHeads

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None) -> HydraDrafter:
        arch, offset = config.get("hydra_head_arch", "mlp"), config.get("hidden_state_offset", 0)
        if arch != "mlp" or offset:
            what = f"the architecture {arch!r:.60}" if arch != "mlp" else f"a hidden_state_offset of {offset!r:.60}"
            raise CheckpointError(f'the Hydra heads in {directory} have {what}: only "mlp" heads of the final feature.')
        check_uncomputed(config.get)
        weights = Weights(directory, partial(our_name, more=_OF_HYDRA))
        count = len({name.split(".")[1] for name in weights.shapes if name.startswith("lm_heads.")})
        blocks = len({name.split(".")[2] for name in weights.shapes if name.startswith("blocks.0.")})
        table = weights.shapes.get("lm_heads.0.weight", ())
        if len(table) != 2 or not blocks:
            raise CheckpointError(f"the Hydra heads in {directory} lack an MLP or an LM head, a table [V, H].")
        check_sizes(f"each of the Hydra heads in {directory}", table[1], table[0], target)
        grounded = flag(config.get, "grounded_heads")
        with torch.device("meta"):
            head = MedusaHeads(count, blocks, table[1], table[0], count, (True, True), grounded)
        return cls(filled(head, weights, {name: name for name in weights.shapes}, target), target, count, shape)

    def begin(self, features: Tensor) -> Tensor:
        return features[:, None]

    def step(self, depth: int, tokens: Tensor, state: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        if self.head.grounded:
            state = torch.cat([state, self.target.embed(tokens)], -1)
        return self.head.logits(depth, state, self.target), state


def _draft_ids(config: Mapping[str, Any], weights: Weights, rows: int, vocabulary: int) -> Tensor | None:
    """Return the target ids [Vd] over which vLLM's LM heads with this many rows, Vd or V, draft; None: all V.

    Raises CheckpointError if the ids are malformed or missing.
    """
    truncated = config.get("truncated_vocab_size")
    if truncated in (None, config.get("vocab_size")):
        return None
    if _TOKEN_MAP not in weights.shapes:
        raise CheckpointError(f"it drafts over {truncated!r:.60} of {vocabulary} ids and has no {_TOKEN_MAP} of them.")
    ids = weights.read(_TOKEN_MAP, INTEGERS).flatten().long()
    check_sizes_agree(config.get, truncated_vocab_size=len(ids))
    check_draft_ids(ids.sort().values, vocabulary)
    if rows not in (len(ids), vocabulary):
        raise CheckpointError(
            f"its LM heads have {rows} rows, and {_TOKEN_MAP} {len(ids)} of {vocabulary} ids. {AGAIN}"
        )
    return ids


def _names(directory: Path, weights: Weights) -> dict[str, str]:
    """Return the stored name of each tensor of :class:`MedusaHeads`.

    The authors number a head's LM head as its last block.
    """
    names, last = dict[str, str](), dict[str, str]()
    inside = any(stored.startswith("medusa_head") for stored in weights.shapes)  # a model with heads: Medusa-2
    for stored, shape in weights.shapes.items():
        if inside and not stored.startswith("medusa_head"):
            continue
        if match := _LM_HEAD.fullmatch(stored):
            if match[1] or "lm_heads.0.weight" not in names:  # a copy of the target's may be next to the heads' own
                names[f"lm_heads.{match[1] or 0}.weight"] = stored
        elif (match := _BLOCK.fullmatch(stored)) and (len(shape) != 2 or ".linear." in stored or "blocks." in stored):
            names[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = stored
        elif match:
            last[f"lm_heads.{match[1]}.weight"] = stored
        elif QUANTISED.search(stored):
            weights.refuse_quantised(stored)
        elif stored != _TOKEN_MAP:
            raise CheckpointError(f"the Medusa heads in {directory} have {stored}, which is not known here.")
    return names | last
