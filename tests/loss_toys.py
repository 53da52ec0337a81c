"""A small batch for the tests of losses, the plain formulas they are compared with, and all losses by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsd_train.losses import LOSSES, DraftBatch, LMHead, Loss, MixLoss, Part

S, N, H, VD = 3, 14, 8, 19

# two sequences whose answers take flat positions 3..9 and 20..26
POSITIONS = torch.cat([torch.arange(3, 10), torch.arange(20, 27)])


def build_loss(name: Any, args: dict[str, Any] | None = None) -> Loss:
    """A loss by its name and arguments, or a mix by a list of ``{name, weight, args}``."""
    if isinstance(name, list):
        return MixLoss([Part(build_loss(part["name"], part.get("args")), part.get("weight", 1.0)) for part in name])
    args = dict(args or {})
    if name == "adaspec" and "loss" in args:
        args["loss"] = build_loss(args["loss"], args.pop("loss_args", None))
    return LOSSES.get(name)(**args)


def make_batch(spread: float = 0.6, seed: int = 0, **head: Any) -> tuple[DraftBatch, Tensor]:
    """A batch whose step s stands on the positions of its answer from the s-th on, and leaves a hole at step 1."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(N, H, generator=generator)
    estimates = (features + spread * torch.randn(S, N, H, generator=generator)).requires_grad_()
    weights = torch.ones(S, N) * torch.tensor([1.0, 0.5, 0.25])[:, None]
    for step in range(S):
        weights[step, :step] = weights[step, 7 : 7 + step] = 0
    weights[1, 11] = 0
    bias = torch.randn(VD, generator=generator) if head.pop("bias", False) else None
    lm_head = LMHead(torch.randn(VD, H, generator=generator), bias, **head)
    return DraftBatch(estimates, features, weights, torch.zeros(N, dtype=torch.long), POSITIONS, lm_head), estimates


def plain_logits(hidden: Tensor, head: LMHead) -> Tensor:
    raw = hidden @ head.weight.double().T
    raw = (raw if head.bias is None else raw + head.bias.double()) * head.scale
    return raw if head.cap is None else torch.tanh(raw / head.cap) * head.cap


def distributions(batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """p [1, N, Vd] and q [S, N, Vd] in fp64, nothing chunked or fused."""
    q = plain_logits(batch.estimates.double(), batch.head).softmax(-1)
    return plain_logits(batch.features.double(), batch.head).softmax(-1)[None], q


def plain_kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def plain_js(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * plain_kl(p, (p + q) / 2) + 0.5 * plain_kl(q, (p + q) / 2)


PLAIN = {
    "kl_qp": lambda p, q: plain_kl(q, p),
    "kl_pq": plain_kl,
    "js": plain_js,
    "tv": lambda p, q: 0.5 * (p - q).abs().sum(-1),
}


def overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum()


def check(batch: DraftBatch, estimates: Tensor, loss: Tensor, expected: Tensor) -> None:
    """Same value and same gradient on the estimates; there is a gradient, and none where nothing is supervised."""
    torch.testing.assert_close(loss.double(), expected.double(), atol=2e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad(loss, estimates)
    (wanted,) = torch.autograd.grad(expected, estimates)
    torch.testing.assert_close(grad, wanted, atol=2e-6, rtol=2e-4)
    assert grad.abs().max() > 1e-3
    assert (grad[batch.weights == 0] == 0).all()


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("kl_qp", {}),
    ("kl_pq", {}),
    ("js", {}),
    ("tv", {}),
    ("lk", {}),
    ("lk", {"form": "log"}),
    ("fsd", {}),
    ("fsd", {"threshold": 0.0, "width": 4, "temperature": 0.7}),
    ("fsd", {"divergence": "top_k_js:4", "threshold": [0.1, 0.3]}),
    ("fsd", {"divergence": "ag", "threshold": 0.5, "width": 4, "temperature": 0.7}),
    ("fsd", {"divergence": "kl_qp", "threshold": 0.5, "temperature": 0.7}),
]
