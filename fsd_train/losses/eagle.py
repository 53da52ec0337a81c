"""The loss of EAGLE-1/2: match the target's features and its distributions over the draft vocabulary."""

from dataclasses import dataclass  # recipes are checked by its types, which must not be postponed

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_train.losses.base import LOSSES, DraftBatch, Loss, LossOutput, with_features
from fsd_train.losses.rows import RowFunction, mean_of_rows
from fsd_train.types import NonNegativeFloat, PositiveInt


def _cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    return -torch.linalg.vecdot(p, log_q)[None]


def _grad(p: Tensor, log_q: Tensor) -> Tensor:
    """Return q − p, the gradient on the logits of q, in place of log q."""
    return log_q.exp_().sub_(p)


# −Σ_v p(v) log q(v) in nats; alive at the peak: p, logits, q and temporaries of a soft cap's gradient
CROSS_ENTROPY = RowFunction(_cross_entropy, grad=_grad, takes_p=True, live=5)


@LOSSES.register("eagle")
@dataclass(eq=False)
class EagleLoss(Loss):
    """w_feature·SmoothL1(estimate, feature) + w_ce·soft cross-entropy, each a weighted mean over supervised rows.

    :func:`fsd_train.losses.base.feature_distance` defines the first term.

    Args:
        w_feature: weight of the feature term; 0 omits it.
        w_ce: weight of the cross-entropy.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    w_feature: NonNegativeFloat = 1.0
    w_ce: NonNegativeFloat = 0.1
    chunk_size: PositiveInt | None = None

    def __post_init__(self) -> None:
        if self.w_feature + self.w_ce == 0:
            raise DataError("eagle: w_feature and w_ce are both 0; set one above 0.")

    def __call__(self, batch: DraftBatch) -> LossOutput:
        ce, agree = mean_of_rows(CROSS_ENTROPY, batch, self.chunk_size)
        loss, parts = self.w_ce * ce, {"ce_loss": ce.detach()}
        return with_features(self.w_feature, batch, LossOutput(loss, parts, agree))
