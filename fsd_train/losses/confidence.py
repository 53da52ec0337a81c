"""The loss of a confidence head (DSpark, arXiv 2607.05147): how likely each draft is accepted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from fsd_train.losses.base import DraftBatch, LossOutput, batch_mean, weighted_mean
from fsd_train.losses.rows import RowFunction, chunked_rows, log_overlap


def with_confidence(batch: DraftBatch, out: LossOutput) -> LossOutput:
    """Add to a loss the cross-entropy of the confidences to Σ min(p, q), over the draft vocabulary.

    That probability has no gradient. A batch without a confidence head leaves the loss as it is.
    """
    if batch.confidence is None:
        return out
    with torch.no_grad():
        overlap, _ = chunked_rows(RowFunction.of_one(log_overlap), batch, None)
        accept_probs = overlap[0].exp()  # [R]
    each = binary_cross_entropy_with_logits(batch.confidence.float(), accept_probs.clamp_max(1.0), reduction="none")
    parts = {"confidence_loss": batch_mean(each, batch.rows), "confidence_gap": _gap(batch, accept_probs)}
    return replace(out, loss=out.loss + weighted_mean(each, batch.rows), parts={**out.parts, **parts})


def _gap(batch: DraftBatch, accept_probs: torch.Tensor) -> torch.Tensor:
    """Return the mean distance between confidence and probability of acceptance, for logs."""
    assert batch.confidence is not None
    return batch_mean((batch.confidence.float().sigmoid() - accept_probs).abs(), batch.rows)
