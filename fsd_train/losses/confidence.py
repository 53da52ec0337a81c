"""The loss of a confidence head (DSpark, arXiv 2607.05147): how likely each draft is accepted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from fsd_train.losses.base import DraftBatch, LossOutput, batch_mean, weighted_mean
from fsd_train.losses.rows import RowFunction, chunked_rows, log_overlap


def with_confidence(logits: Tensor, batch: DraftBatch, out: LossOutput) -> LossOutput:
    """Add to a loss the cross-entropy of a confidence head's logits [R] to Σ min(p, q), over the draft vocabulary.

    That probability has no gradient.
    """
    logits = logits.float()
    with torch.no_grad():
        overlap, _ = chunked_rows(RowFunction.of_one(log_overlap), batch, None)
        accept_probs = overlap[0].exp()  # [R]
    each = binary_cross_entropy_with_logits(logits, accept_probs.clamp_max(1.0), reduction="none")
    gap = (logits.sigmoid() - accept_probs).abs()
    parts = {"confidence_loss": batch_mean(each, batch.rows), "confidence_gap": batch_mean(gap, batch.rows)}
    return replace(out, loss=out.loss + weighted_mean(each, batch.rows), parts={**out.parts, **parts})
