"""Draft with MLP speculators of IBM (arXiv 2404.19124): a recurrent network without attention.

From the target's feature h and the newest token, for i = 0 … N - 1:

    s ← W_i s + c·E_i[token];  s ← GELU(LN_i(s));  logits_i = U_i s

with c = w_e/w_s, w_s = 0.5^(0.5/N), w_e = √((1 - w_s²)·D/2) for states of width D.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from fsd_core.errors import CheckpointError
from fsd_infer.drafters.steps import HEADS, StepDrafter, filled
from fsd_infer.heads.config import check_integer
from fsd_infer.heads.kinds import MLP_SPECULATOR
from fsd_infer.heads.stored_parts import check_sizes_agree, check_uncomputed, flag, our_name
from fsd_infer.heads.weights import Weights, check_sizes
from fsd_infer.targets.target import Target
from fsd_infer.trees.shape import TreeShape

_EPS = 1e-6
_MOST_STEPS = 64


class RootMeanSquareNorm(nn.Module):
    """LN: x·rsqrt(mean x²)·weight + bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.weight + self.bias


def rms(x: Tensor) -> Tensor:
    """Return x [..., D] divided by its root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)


class MLPSpeculator(nn.Module):
    """Parameters are named as in the files. Tied ones exist once, with number 0; tied projections twice, 0 and 1.

    Args:
        count: N.
        size: H, of the target's features.
        width: D.
        vocabulary: V.
        tied: how many of each list there are: embeddings, norms and LM heads, and projections.
        scaled: whether features are divided by √2 times their root mean square first.
    """

    def __init__(self, count: int, size: int, width: int, vocabulary: int, tied: tuple[int, int], scaled: bool) -> None:
        super().__init__()
        self.count, self.width, self.scaled = count, width, scaled
        parts, projections = tied
        self.emb = nn.ModuleList(nn.Embedding(vocabulary, width) for _ in range(parts))
        self.proj = nn.ModuleList(nn.Linear(width if i else size, width, bias=False) for i in range(projections))
        self.ln = nn.ModuleList(RootMeanSquareNorm(width) for _ in range(parts))
        self.head = nn.ModuleList(nn.Linear(width, vocabulary, bias=False) for _ in range(parts))

    def begin(self, features: Tensor) -> Tensor:
        """Return the first state [..., H] of the target's features [..., H]."""
        return rms(features) / math.sqrt(2.0) if self.scaled else features

    def forward(self, index: int, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [..., V] and states [..., D] after tokens [...] with states [..., H or D], at a step from 0."""
        keeps = 0.5 ** (0.5 / self.count)
        weight = math.sqrt((1.0 - keeps**2) * self.width / 2.0) / keeps
        part, projection = min(index, len(self.emb) - 1), min(index, len(self.proj) - 1)
        state = self.proj[projection](state) + weight * self.emb[part](tokens)
        state = gelu(self.ln[part](state))
        return self.head[part](state), state


@HEADS.register(MLP_SPECULATOR)
class MLPSpeculatorDrafter(StepDrafter):
    """An MLP speculator. A node's state is the network's."""

    name = "mlp-speculator"
    head: MLPSpeculator

    @classmethod
    def read(
        cls, directory: Path, config: Mapping[str, Any], target: Target, shape: TreeShape | None
    ) -> MLPSpeculatorDrafter:
        weights = Weights(directory, partial(our_name, more={"speculator.": ""}))
        count, shapes, names = config.get("n_predict", 3), weights.shapes, {name: name for name in weights.shapes}
        first = [shapes.get(f"{part}.0.weight", ()) for part in ("emb", "proj", "ln", "head")]
        # building a garbled number of steps would take hours
        check_integer(f"n_predict of the MLP speculator in {directory}", count, 1, _MOST_STEPS)
        if [len(shape) for shape in first] != [2, 2, 1, 2]:
            raise CheckpointError(f"the MLP speculator in {directory} lacks a tensor of its first step.")
        (vocabulary, width), size = first[0], first[1][1]
        check_sizes(f"the MLP speculator in {directory}", size, vocabulary, target)
        check_uncomputed(config.get)
        inner = config.get("inner_dim") or config.get("emb_dim")  # 0 stands for the same
        check_sizes_agree({**config, "inner_dim": inner}.get, vocab_size=vocabulary, emb_dim=size, inner_dim=width)
        tied, scaled = (flag(config.get, name) for name in ("tie_weights", "scale_input"))
        if tied:
            names = _without_repeats(weights, names, count)
        lengths = (1, min(count, 2)) if tied else (count, count)
        with torch.device("meta"):
            head = MLPSpeculator(count, size, width, vocabulary, lengths, scaled)
        return cls(filled(head, weights, names, target), target, count, shape)

    def begin(self, features: Tensor) -> Tensor:
        return self.head.begin(features)[:, None]

    def step(self, depth: int, tokens: Tensor, state: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = self.head(depth, tokens, state)
        return logits, state


def _without_repeats(weights: Weights, names: dict[str, str], count: int) -> dict[str, str]:
    """Return the names without repeated copies of tied tensors. Raises CheckpointError if a repeat differs."""
    result = dict(names)
    for part, first in (("emb", 0), ("ln", 0), ("head", 0), ("proj", 1)):
        for step, parameter in itertools.product(range(first + 1, count), ("weight", "bias")):
            name, tied = f"{part}.{step}.{parameter}", f"{part}.{first}.{parameter}"
            stored = result.pop(name, None)
            if stored is None:
                continue
            if tied not in names or not torch.equal(weights.read(stored), weights.read(names[tied])):
                raise CheckpointError(
                    f"the MLP speculator in {weights.directory} says tie_weights, and its {name} differs from {tied}."
                )
    return result
