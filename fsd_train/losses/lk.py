"""LK losses (arXiv 2602.23881): acceptance rate as a loss whose gradient does not vanish at the start."""

from dataclasses import dataclass  # recipes are checked by its types, which must not be postponed
from typing import Literal

import torch
from torch import Tensor

from fsd_train.losses.base import LOSSES, TINY, DraftBatch, Loss, LossOutput, batch_mean, with_features
from fsd_train.losses.rows import RowFunction, chunked_rows, divergence_rows, log_overlap
from fsd_train.types import NonNegativeFloat, PositiveInt

_kl_pq = divergence_rows("kl_pq")


def _kl_and_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.stack([_kl_pq(log_p, log_q), log_overlap(log_p, log_q).exp()])


_LOG = RowFunction.of_one(log_overlap)
_ADAPTIVE = RowFunction(_kl_and_acceptance, count=2)


@LOSSES.register("lk")
@dataclass(eq=False)
class LKLoss(Loss):
    """Loss of α = Σ min(p, q) = 1 − TV, the probability that a token sampled from q passes the exact test.

    - form "adaptive": λ·KL(p||q) + (1−λ)·(1−α), with λ = exp(−eta·α) constant in the gradient. KL dominates for a weak
      drafter, TV for a good one.
    - form "log": −ln α, whose gradient is that of TV divided by α.

    p and q are raw distributions over the draft vocabulary, within which p is renormalised.

    Args:
        form: "adaptive" or "log".
        eta: rate at which the adaptive form turns to TV (the paper's best is 3); 0 is pure KL.
        level: α in λ or under the logarithm. "step": the weighted mean over a batch's rows of one chain step, as in
            the authors' code. "row": each row's α.
        w_feature: weight of the ``eagle`` loss's feature term; 0 omits it.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    form: Literal["adaptive", "log"] = "adaptive"
    eta: NonNegativeFloat = 3.0
    level: Literal["step", "row"] = "step"
    w_feature: NonNegativeFloat = 0.0
    chunk_size: PositiveInt | None = None

    def __call__(self, batch: DraftBatch) -> LossOutput:
        share = batch.weights / batch.rows.total.clamp_min(TINY)  # [R], sums to 1 over an optimizer step's batches
        if self.form == "log":
            values, agree = chunked_rows(_LOG, batch, self.chunk_size)  # [1, R], [R]
            log_alpha = values[0]
            alpha = log_alpha.exp()
            if self.level == "step":
                log_alpha = _per_step(alpha, batch).log()
            loss = -(log_alpha * share).sum()
            parts = {}
        else:
            values, agree = chunked_rows(_ADAPTIVE, batch, self.chunk_size)  # [2, R], [R]
            kl, alpha = values
            rate = alpha.detach()
            mix = (-self.eta * (rate if self.level == "row" else _per_step(rate, batch))).exp()
            loss = ((mix * kl + (1 - mix) * (1 - alpha)) * share).sum()
            parts = {"kl_pq_loss": batch_mean(kl, batch.rows), "kl_share": batch_mean(mix, batch.rows)}
        parts = {"lk_loss": loss.detach(), "acceptance": batch_mean(alpha, batch.rows), **parts}
        return with_features(self.w_feature, batch, LossOutput(loss, parts, agree))


def _per_step(alpha: Tensor, batch: DraftBatch) -> Tensor:
    """Replace each row's alpha [R] by the weighted mean of its step."""
    total = batch.rows.sum_by_step(batch.weights)  # [S]
    mean = batch.rows.sum_by_step(alpha * batch.weights) / total.clamp_min(TINY)  # [S]
    return torch.where(total > 0, mean, 1.0).clamp_min(torch.finfo(mean.dtype).tiny)[batch.rows.step]
