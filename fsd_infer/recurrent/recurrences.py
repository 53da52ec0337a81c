"""What recurrent layers compute over a text and over a draft tree, each a :class:`fsd_infer.device.states.Recurrence`.

:class:`Convolution` is the short causal convolution in front of a scan; LFM2 has no scan. The others are scans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from fsd_infer.device.states import Branches, Inputs, chain_of


@dataclass(frozen=True, eq=False)
class Convolution:
    """One filter per channel, which reads the last K inputs.

    Inputs: (x [B, M, C],). State: the last K - 1 inputs [B, K - 1, C].

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
        indices = torch.stack([branches.up(width - 1 - tap) for tap in range(width)], -1) + before  # [B, M, K]
        rows = torch.arange(len(x), device=x.device)[:, None, None]
        windows = torch.cat([state, x], 1)[rows, indices]  # [B, M, K, C]
        out = torch.einsum("bmkc,ck->bmc", windows.to(self.weight.dtype), self.weight)
        return self._activated(out if self.bias is None else out + self.bias).to(x.dtype)

    def chain(self, state: Tensor, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = inputs
        read = torch.cat([state, x], 1)
        turned, weight = read.transpose(1, 2).to(self.weight.dtype), self.weight[:, None]
        output = self._activated(F.conv1d(turned, weight, self.bias, groups=len(weight))).transpose(1, 2)
        last = counts[:, None] + torch.arange(state.shape[1], device=x.device)
        return output.to(x.dtype), read.gather(1, last[..., None].expand(-1, -1, x.shape[2]))

    def _activated(self, out: Tensor) -> Tensor:
        return out if self.activation is None else ACT2FN[self.activation](out)


@dataclass(frozen=True)
class Duality:
    """State-space duality, the scan of Mamba-2 (https://arxiv.org/abs/2405.21060).

    Per head, with a decay a ≤ 0: S ← e^a S + x b^T and y = S c. On a tree, with T the sum of a along a token's
    ancestors, y_i = e^T_i S c_i + Σ_j e^(T_i - T_j) (b_j · c_i) x_j over the ancestors j of i and i itself.

    Inputs: decay [B, M, H], x [B, M, H, P], b and c [B, M, G, N], G a divisor of H. State: [B, H, P, N].
    """

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


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (https://arxiv.org/abs/2412.06464), and Kimi's, whose decays differ by channel.

    Per head, with a decay g ≤ 0: S ← e^g S, then S ← S + k u^T with u = β (v - S^T k), and y = S^T q. The corrections u
    of a tree solve a linear system (https://arxiv.org/abs/2406.06484). It is triangular, since parents precede their
    children. T is the sum of g along a token's ancestors, and the sum is over the ancestors j of i:

        u_i + β_i Σ_j (k_i · e^(T_i - T_j) k_j) u_j = β_i (v_i - S^T e^T_i k_i)

    Inputs: q and k [B, M, H, K], v [B, M, H, V], g [B, M, H, 1 or K], beta [B, M, H]. State: [B, H, K, V].
    """

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


@dataclass(frozen=True, eq=False)
class Selective:
    """The selective scan of Mamba (https://arxiv.org/abs/2312.00752).

    Per channel, with a step Δ ≥ 0 and a vector a < 0: h ← e^(Δ a) h + Δ x b and y = h · c. Decays differ by channel and
    by state, so no product of matrices reads a tree at once. Its levels are read one after the other.

    Inputs: step and x [B, M, C], b and c [B, M, N]. State: [B, C, N].

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
        for index in range(x.shape[1]):
            state = decay[:, index] * state + added[:, index]
            outputs.append(torch.einsum("bcn,bn->bc", state, c[:, index]))
        return torch.stack(outputs, 1), state

    def _discrete(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        step, x, b, _ = inputs
        return (step[..., None] * self.a).exp(), (step * x)[..., None] * b[:, :, None]
