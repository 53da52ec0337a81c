"""The short causal convolution in front of a scan, alone in LFM2: each output reads the last K inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from fsd_infer.device.states import Branches, Inputs


@dataclass(frozen=True, eq=False)
class Convolution:
    """One filter per channel. Inputs: (x [B, M, C],). State: the last K - 1 inputs [B, K - 1, C].

    Attributes:
        weight: [C, K], the newest input last.
        bias: [C].
        activation: its name in transformers.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str | None

    def initial(self, inputs: Inputs) -> Tensor:
        (x,) = inputs
        return x.new_zeros(x.shape[0], self.weight.shape[1] - 1, x.shape[2])

    def tree(self, state: Tensor, inputs: Inputs, branches: Branches) -> Tensor:
        (x,) = inputs
        width, before = self.weight.shape[1], state.shape[1]
        places = torch.stack([branches.up(width - 1 - tap) for tap in range(width)], -1) + before  # [B, M, K]
        rows = torch.arange(len(x), device=x.device)[:, None, None]
        windows = torch.cat([state, x], 1)[rows, places]  # [B, M, K, C]
        out = torch.einsum("bmkc,ck->bmc", windows.to(self.weight.dtype), self.weight)
        return self._activated(out if self.bias is None else out + self.bias).to(x.dtype)

    def chain(self, state: Tensor, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        read = torch.cat([state, x], 1)
        turned, weight = read.transpose(1, 2).to(self.weight.dtype), self.weight[:, None]
        output = self._activated(F.conv1d(turned, weight, self.bias, groups=len(weight))).transpose(1, 2)
        kept = counts[:, None] + torch.arange(state.shape[1], device=x.device)
        return output.to(x.dtype), read.gather(1, kept[..., None].expand(-1, -1, x.shape[2]))

    def _activated(self, out: Tensor) -> Tensor:
        return out if self.activation is None else ACT2FN[self.activation](out)
