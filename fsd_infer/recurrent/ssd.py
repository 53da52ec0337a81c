"""State-space duality, the scan of Mamba-2 (https://arxiv.org/abs/2405.21060).

Per head, with a decay a ≤ 0: S ← e^a S + x b^T and y = S c. On a tree, with T the sum of a along a token's ancestors,
y_i = e^T_i S c_i + Σ_j e^(T_i - T_j) (b_j · c_i) x_j over the ancestors j of i and i itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.states import Branches, Inputs, chain_of


@dataclass(frozen=True)
class Duality:
    """Inputs: decay [B, M, H], x [B, M, H, P], b and c [B, M, G, N], G a divisor of H. State: [B, H, P, N]."""

    def initial(self, inputs: Inputs) -> Tensor:
        _, x, b, _ = inputs
        return x.new_zeros(len(x), *x.shape[2:], b.shape[-1])

    def tree(self, state: Tensor, inputs: Inputs, branches: Branches) -> Tensor:
        decay, x, b, c = inputs
        total, each = branches.along(decay), x.shape[2] // b.shape[2]
        between = (total[:, :, None] - total[:, None]).masked_fill(~branches.ancestors[..., None], -math.inf)  # b i j h
        scores = torch.einsum("bign,bjgn->bijg", c, b).repeat_interleave(each, -1) * between.exp()
        read = torch.einsum("bhpn,bihn->bihp", state, c.repeat_interleave(each, 2)) * total.exp()[..., None]
        return read + torch.einsum("bijh,bjhp->bihp", scores, x)

    def chain(self, state: Tensor, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        decay, x, b, _ = inputs
        output = self.tree(state, inputs, chain_of(x))
        real = (torch.arange(x.shape[1], device=x.device) < counts[:, None])[..., None]
        total = (decay * real).cumsum(1)
        left = (total[:, -1:] - total).exp() * real  # what is left of each input at the end
        added = torch.einsum("bjhp,bjhn->bhpn", x * left[..., None], b.repeat_interleave(x.shape[2] // b.shape[2], 2))
        return output, state * total[:, -1, :, None, None].exp() + added
