"""The selective scan of Mamba (https://arxiv.org/abs/2312.00752).

Per channel, with a step Δ ≥ 0 and a vector a < 0: h ← e^(Δ a) h + Δ x b and y = h · c. Decays differ by channel and by
state, so no product of matrices reads a tree at once. Its levels are read one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.states import Branches, Inputs


@dataclass(frozen=True, eq=False)
class Selective:
    """Inputs: step and x [B, M, C], b and c [B, M, N]. State: [B, C, N].

    Attributes:
        a: [C, N].
    """

    a: Tensor

    def initial(self, inputs: Inputs) -> Tensor:
        _, x, b, _ = inputs
        return x.new_zeros(len(x), x.shape[2], b.shape[-1])

    def tree(self, state: Tensor, inputs: Inputs, branches: Branches) -> Tensor:
        decay, added = self._discrete(inputs)
        parents = branches.up(1).clamp_min(-1) + 1  # 0: the text
        rows = torch.arange(len(state), device=state.device)[:, None]
        states = state[:, None].expand_as(added)
        for depth in range(branches.depth + 1):
            above = torch.cat([state[:, None], states], 1)[rows, parents]
            states = torch.where((branches.depths == depth)[..., None, None], decay * above + added, states)
        return torch.einsum("bmcn,bmn->bmc", states, inputs[3])

    def chain(self, state: Tensor, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        step, x, b, c = inputs
        real = (torch.arange(x.shape[1], device=x.device) < counts[:, None])[..., None]
        decay, added = self._discrete((step * real, x, b, c))
        outputs = []
        for place in range(x.shape[1]):
            state = decay[:, place] * state + added[:, place]
            outputs.append(torch.einsum("bcn,bn->bc", state, c[:, place]))
        return torch.stack(outputs, 1), state

    def _discrete(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        step, x, b, _ = inputs
        return (step[..., None] * self.a).exp(), (step * x)[..., None] * b[:, :, None]
