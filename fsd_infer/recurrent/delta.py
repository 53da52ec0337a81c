"""The gated delta rule (https://arxiv.org/abs/2412.06464), and Kimi's, whose decays differ by channel.

Per head, with a decay g ≤ 0: S ← e^g S, then S ← S + k u^T with u = β (v - S^T k), and y = S^T q. The corrections u of
a tree solve a linear system (https://arxiv.org/abs/2406.06484). It is triangular, since parents precede their children.
T is the sum of g along a token's ancestors, and the sum is over the ancestors j of i:

    u_i + β_i Σ_j (k_i · e^(T_i - T_j) k_j) u_j = β_i (v_i - S^T e^T_i k_i)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.device.states import Branches, Inputs, chain_of


@dataclass(frozen=True)
class DeltaRule:
    """Inputs: q and k [B, M, H, K], v [B, M, H, V], g [B, M, H, 1 or K], beta [B, M, H]. State: [B, H, K, V]."""

    def initial(self, inputs: Inputs) -> Tensor:
        _, k, v, *_ = inputs
        return k.new_zeros(len(k), *k.shape[2:], v.shape[-1])

    def tree(self, state: Tensor, inputs: Inputs, branches: Branches) -> Tensor:
        q = inputs[0].transpose(1, 2)
        total = branches.along(inputs[3]).transpose(1, 2)  # [B, H, M, 1 or K]
        corrections = self._corrections(state, inputs, total, branches)
        return _read(state, q, inputs[1].transpose(1, 2), total, corrections, branches).transpose(1, 2)

    def chain(self, state: Tensor, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = inputs
        real = (torch.arange(k.shape[1], device=k.device) < counts[:, None])[..., None]
        inputs, branches = (q, k, v, g * real[..., None], beta * real), chain_of(k)
        total, q, k = (x.transpose(1, 2) for x in (inputs[3].cumsum(1), q, k))
        corrections = self._corrections(state, inputs, total, branches)  # 0 after the last real token
        output = _read(state, q, k, total, corrections, branches).transpose(1, 2)
        end = total[:, :, -1:]
        added = (k * (end - total).exp()).transpose(2, 3) @ corrections
        return output, state * end.exp().transpose(2, 3) + added

    def _corrections(self, state: Tensor, inputs: Inputs, total: Tensor, branches: Branches) -> Tensor:
        """Return u [B, H, M, V]."""
        _, k, v, _, beta = (x.transpose(1, 2) for x in inputs)
        k_beta = k * beta[..., None]
        system = _products(k_beta, k, total, branches).tril(-1)
        right = v * beta[..., None] - (k_beta * total.exp()) @ state
        return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def _read(state: Tensor, q: Tensor, k: Tensor, total: Tensor, corrections: Tensor, branches: Branches) -> Tensor:
    """Return y [B, H, M, V]."""
    return (q * total.exp()) @ state + _products(q, k, total, branches) @ corrections


def _products(left: Tensor, right: Tensor, total: Tensor, branches: Branches) -> Tensor:
    """Return left_i · e^(T_i - T_j) right_j [B, H, M, M], 0 unless j is i or its ancestor."""
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill(~branches.ancestors[:, None, ..., None], -math.inf)
    if total.shape[-1] == 1:
        return (left @ right.transpose(2, 3)) * between[..., 0].exp()
    return torch.einsum("bhik,bhjk,bhijk->bhij", left, right, between.exp())
