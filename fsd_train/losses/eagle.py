"""The loss of EAGLE-1/2: match the target's features, and its distributions over the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsd_infer.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, LMHead, Loss, LossOutput, weighted_mean, with_features
from fsd_train.losses.rows import (
    blocks,
    chunked_rows,
    default_chunk_size,
    full_precision,
    supervised_rows,
    within,
)
from fsd_train.types import NonNegativeFloat, PositiveInt

# Tensors of a block's size that are alive at the peak: p, logits, q, and what a soft cap's gradient makes of them.
LIVE = 5


class _SoftCrossEntropy(torch.autograd.Function):
    """Soft cross-entropy at [S, N] rows without ever holding [N, Vd]; see :func:`soft_cross_entropy`.

    The LM head is frozen, so the only gradient wanted is [S, N, H], and it is linear in the incoming one: it is
    computed with the loss, chunk by chunk while the chunk's logits are in the cache, and only scaled in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, estimates: Tensor, features: Tensor, head: LMHead, chunk_size: int, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps, rows, width = estimates.shape
        losses = torch.zeros(steps, rows, dtype=torch.float32, device=estimates.device)
        agree = torch.zeros(steps, rows, dtype=torch.bool, device=estimates.device)
        grad = torch.zeros_like(estimates) if ctx.needs_input_grad[0] else None
        pieces = blocks(rows, chunk_size, LIVE)
        for piece, numbers in zip(pieces, supervised_rows(counted, pieces, estimates.device), strict=True):
            p = head(features[piece])  # [n, Vd]
            best = p.argmax(-1)
            p = p.softmax(-1)
            for step, block in enumerate(numbers):
                inside = within(piece, block)
                logits = head(estimates[step, block])
                log_q = logits.log_softmax(-1)
                agree[step, block] = log_q.argmax(-1) == best[inside]
                losses[step, block] = -torch.linalg.vecdot(p[inside], log_q)
                if grad is not None:
                    slope = log_q.exp_().sub_(p[inside])
                    grad[step, block] = head.grad_hidden(logits, slope).to(grad.dtype)
                    del slope
                del logits, log_q  # or they live on beside the next step's
            del p
        ctx.save_for_backward(*([] if grad is None else [grad]))
        ctx.mark_non_differentiable(agree)
        return losses, agree

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grads[0][..., None] * grad).to(grad.dtype), None, None, None, None


def soft_cross_entropy(
    estimates: Tensor, features: Tensor, head: LMHead, chunk_size: int | None = None, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """−Σ_v p(v) log q(v) in nats, p and q being softmaxes over the draft vocabulary (p renormalised within it).

    Args:
        estimates: [S, N, H], the drafter's; the only differentiable argument.
        features: [N, H], the target's.
        head: LM head rows of the draft vocabulary.
        chunk_size: rows whose fp32 logits would fill the memory that may be used: the peak stays below
            1.3·4·chunk_size·Vd bytes (chunk_size ≥ 5). None: :func:`.default_chunk_size`.
        counted: [S, N] bool in host memory, rows without are left out: their loss is 0; None for all rows.

    Returns:
        (loss [S, N] fp32, agreement [S, N] bool: the two most likely tokens are the same)
    """
    if counted is None:
        counted = torch.ones(estimates.shape[:2], dtype=torch.bool)
    if chunk_size is None:
        chunk_size = default_chunk_size(estimates.device.type, len(head.weight))
    with full_precision(estimates.device):
        losses, agree = _SoftCrossEntropy.apply(estimates, features, head, chunk_size, counted)
    return losses, agree


def _cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -torch.linalg.vecdot(log_p.exp(), log_q)[None]


@LOSSES.register("eagle")
class EagleLoss(Loss):
    """w_feature·SmoothL1(estimate, feature) + w_ce·soft cross-entropy, each a weighted mean over supervised rows.

    SmoothL1 (averaged over the H dimensions) is taken in the space the head reads: divided by ``feature_scale`` where
    the head has one, so that outlier dimensions do not drown the others.

    Args:
        w_feature: weight of the feature term; 0 leaves it out.
        w_ce: weight of the cross-entropy.
        chunk_size: memory bound in rows of logits, see :func:`soft_cross_entropy`.
    """

    def __init__(
        self,
        w_feature: NonNegativeFloat = 1.0,
        w_ce: NonNegativeFloat = 0.1,
        chunk_size: PositiveInt | None = None,
    ) -> None:
        if w_feature + w_ce == 0:
            raise DataError("eagle: w_feature and w_ce are both 0: leave one above.")
        self.w_feature = w_feature
        self.w_ce = w_ce
        self.chunk_size = chunk_size

    def __call__(self, batch: DraftBatch) -> LossOutput:
        if batch.own_head is None:
            entropy, agree = soft_cross_entropy(
                batch.estimates, batch.features, batch.head, self.chunk_size, batch.rows.counted
            )
        else:
            values, agree = chunked_rows(_cross_entropy, batch, self.chunk_size)
            entropy = values[0]
        ce = weighted_mean(entropy, batch.weights)
        loss, parts = self.w_ce * ce, {"ce_loss": ce.detach()}
        return with_features(self.w_feature, batch, LossOutput(loss, parts, agree))
