"""A small batch for the tests of losses, the plain formulas they are compared with, and all losses by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsd_train.losses import LOSSES, DraftBatch, LMHead, Loss, LossOutput, LossTerm, MixLoss
from fsd_train.losses.base import LossIndex

S, N, H, VD = 3, 14, 8, 19

# two sequences whose answers take flat positions 3..9 and 20..26
POSITIONS = torch.cat([torch.arange(3, 10), torch.arange(20, 27)])


def build_loss(name: Any, args: dict[str, Any] | None = None) -> Loss:
    """A loss by its name and arguments, or a mix by a list of ``{name, weight, args}``."""
    if isinstance(name, list):
        return MixLoss([LossTerm(build_loss(part["name"], part.get("args")), part.get("weight", 1.0)) for part in name])
    args = dict(args or {})
    if name == "adaspec":
        args["loss"] = build_loss(args.pop("loss", "kl_pq"), args.pop("loss_args", None))
    return LOSSES.get(name)(**args)


@dataclass(frozen=True)
class Grid:
    """A batch as a grid of steps and positions, which formulas are written for: estimates [S, N, H], weights [S, N]."""

    estimates: Tensor
    features: Tensor
    weights: Tensor
    positions: Tensor
    target_lm_head: LMHead
    feature_scale: Tensor | None = None
    own_lm_head: LMHead | None = None
    reference: Tensor | None = None
    progress: float = 1.0
    step: float = math.inf

    def chains(self) -> list[list[tuple[int, int]]]:
        """For each chain whose steps are all supervised, its (step, place) pairs, by search."""
        places = {int(position): place for place, position in enumerate(self.positions)}
        chains = []
        for start in places:
            chain = [(step, places.get(start + step, -1)) for step in range(len(self.weights))]
            if all(place >= 0 and self.weights[step, place] > 0 for step, place in chain):
                chains.append(chain)
        return chains

    def rows(self) -> LossIndex:
        place, step = (self.weights.T > 0).nonzero().unbind(1)
        number = {pair: row for row, pair in enumerate(zip(step.tolist(), place.tolist()))}
        chains = torch.tensor([[number[pair] for pair in chain] for chain in self.chains()], dtype=torch.long)
        ends = torch.searchsorted(place, torch.arange(len(self.positions) + 1)).tolist()
        chains, weight = chains.view(-1, len(self.weights)).T, self.weights[step, place]
        ones = torch.ones(chains.shape[1])
        return LossIndex(self.positions, place, step, weight, chains, ones, ends, weight.sum(), ones.sum())

    def batch(self) -> DraftBatch:
        rows = self.rows()
        reference = None if self.reference is None else self.reference[rows.step, rows.position_index]
        return DraftBatch(
            self.estimates[rows.step, rows.position_index], self.features, rows, self.target_lm_head,
            self.feature_scale, self.own_lm_head, reference, self.progress, self.step,
        )  # fmt: skip

    def dense(self, values: Tensor) -> Tensor:
        """Values [R] in their places, [S, N], 0 elsewhere."""
        rows = self.rows()
        return values.new_zeros(self.weights.shape).index_put((rows.step, rows.position_index), values)


def grid_loss(name: Any, args: dict[str, Any] | None = None) -> Callable[[Grid], LossOutput]:
    """A loss on a grid, its agreement a grid too."""
    loss = build_loss(name, args)

    def on_grid(grid: Grid) -> LossOutput:
        out = loss(grid.batch())
        return replace(out, agreement=grid.dense(out.agreement))

    return on_grid


def make_batch(spread: float = 0.6, seed: int = 0, *, own: bool = False, **head: Any) -> Grid:
    """A batch whose step s stands on the positions of its answer from the s-th on, and leaves a hole at step 1.

    With ``own`` the drafter has an LM head of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(N, H, generator=generator)
    estimates = (features + spread * torch.randn(S, N, H, generator=generator)).requires_grad_()
    weights = torch.ones(S, N) * torch.tensor([1.0, 0.5, 0.25])[:, None]
    for step in range(S):
        weights[step, :step] = weights[step, 7 : 7 + step] = 0
    weights[1, 11] = 0
    bias = torch.randn(VD, generator=generator) if head.pop("bias", False) else None
    lm_head = LMHead(torch.randn(VD, H, generator=generator), bias, **head)
    trained = (lm_head.weight + 0.3 * torch.randn(VD, H, generator=generator)).requires_grad_()
    own_lm_head = LMHead(trained, bias, **head) if own else None
    return Grid(estimates, features, weights, POSITIONS, lm_head, own_lm_head=own_lm_head)


def plain_logits(hidden: Tensor, head: LMHead) -> Tensor:
    raw = hidden @ head.weight.double().T
    raw = (raw if head.bias is None else raw + head.bias.double()) * head.scale
    return raw if head.cap is None else torch.tanh(raw / head.cap) * head.cap


def distributions(batch: Grid) -> tuple[Tensor, Tensor]:
    """p [1, N, Vd] and q [S, N, Vd] in fp64, nothing chunked or fused."""
    q = plain_logits(
        batch.estimates.double(), batch.target_lm_head if batch.own_lm_head is None else batch.own_lm_head
    ).softmax(-1)
    return plain_logits(batch.features.double(), batch.target_lm_head).softmax(-1)[None], q


def plain_kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def plain_js(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * plain_kl(p, (p + q) / 2) + 0.5 * plain_kl(q, (p + q) / 2)


PLAIN = {
    "kl_qp": lambda p, q: plain_kl(q, p), "kl_pq": plain_kl, "js": plain_js,
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(-1),
}  # fmt: skip


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum()


def plain_lengths(batch: Grid, acceptance: Tensor) -> Tensor:
    """The expected number of accepted drafts of each whole chain, its drafts' chances given by step and place."""
    chains = [torch.stack([acceptance[step, place] for step, place in chain]) for chain in batch.chains()]
    return torch.stack([chances.cumprod(0).sum() for chances in chains])


def check(batch: Grid, loss: Tensor, expected: Tensor) -> None:
    """Same value and same gradients; there are gradients, and none on estimates that are not supervised."""
    torch.testing.assert_close(loss.double(), expected.double(), atol=2e-6, rtol=1e-5)
    leaves = [batch.estimates] if batch.own_lm_head is None else [batch.estimates, batch.own_lm_head.weight]
    found, wanted = (torch.autograd.grad(2 * value, leaves) for value in (loss, expected))
    torch.testing.assert_close(found, wanted, atol=4e-6, rtol=2e-4)
    assert all(float(grad.abs().max()) > 1e-3 for grad in found)
    assert (found[0][batch.weights == 0] == 0).all()


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}), ("kl_qp", {}), ("kl_pq", {}), ("js", {}), ("tv", {}), ("lk", {}), ("lk", {"form": "log"}),
    ("fsd", {}), ("fsd", {"threshold": 0.0, "width": 4, "temperature": 0.7}),
    ("fsd", {"divergence": "top_k_js:4", "threshold": [0.1, 0.3]}),
    ("fsd", {"divergence": "ag", "threshold": 0.5, "width": 4, "temperature": 0.7}),
    ("fsd", {"divergence": "kl_qp", "threshold": 0.5, "temperature": 0.7}),
]  # fmt: skip
