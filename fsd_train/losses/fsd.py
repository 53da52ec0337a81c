"""Expected accepted length under the fuzzy rule. Derivation: docs/losses.md."""

import math
from dataclasses import dataclass  # recipes are checked by its types, which must not be postponed

import torch
from torch import Tensor

from fsd_core.errors import DataError
from fsd_train.losses.base import LOSSES, TINY, DraftBatch, Loss, LossOutput, batch_mean, weighted_mean, with_features
from fsd_train.losses.rows import RowFunction, chunked_rows, divergence_rows
from fsd_train.types import NonNegativeFloat, PositiveFloat, PositiveInt

_ALMOST_ONE = 1 - 1e-6

_kl_pq = divergence_rows("kl_pq")


def expected_length(acceptance: Tensor) -> Tensor:
    """Return the expected number of accepted drafts Σ_k Π_{j≤k} a_j [C] for acceptance [S, C]."""
    # by Horner's rule: the backward pass of torch's cumprod looks for zeros on the host
    length = torch.zeros_like(acceptance[0])
    for accepted in acceptance.flip(0):
        length = accepted * (1 + length)
    return length


def soft_gate(distance: Tensor, threshold: float, softness: float) -> Tensor:
    """Return σ((T−D)/s), a smooth [D ≤ T]; like the gate, closed at T = 0 and open at T = inf."""
    if threshold == 0:
        return torch.zeros_like(distance)
    if math.isinf(threshold):
        return torch.ones_like(distance)
    return torch.sigmoid((threshold - distance) / softness)


@LOSSES.register("fsd")
@dataclass(eq=False)
class FsdLoss(Loss):
    """−ln(L/S) per chain plus an anchor, where L = Σ_k Π_{j≤k} a_j is the expected number of accepted drafts.

    a = e + (1−e)·σ((T−D(p, q))/s) is the probability that ``fuzzy`` keeps a draft, at the contexts of the training text
    and over the draft vocabulary, within which p is renormalised. If ``width`` is None, a chain is sampled from q and
    e = Σ min(p, q). Otherwise a node has ``width`` = k children sampled from q, and e = Σ p·(1−(1−q)^k).

    Args:
        divergence: D, a name of :mod:`fsd_core.divergence`, on raw distributions.
        threshold: T, or several values over which the loss is averaged. 0 is exact decoding.
        softness: s > 0, in the unit of D.
        width: children per node; None: a sampled chain.
        temperature: temperature of p in e and in the anchor, and of a chain's q. The gate reads raw distributions.
        anchor: weight of KL(p||q) over all supervised rows. It trains the steps after a refused first step, which get
            no gradient from L.
        w_feature: weight of the ``eagle`` loss's feature term; 0 omits it.
        chunk_size: memory bound in rows of logits, see :func:`fsd_train.losses.rows.chunked_rows`.
    """

    divergence: str = "js"
    threshold: float | list[float] = 0.3
    softness: PositiveFloat = 0.1
    width: PositiveInt | None = None
    temperature: PositiveFloat = 1.0
    anchor: NonNegativeFloat = 0.1
    w_feature: NonNegativeFloat = 0.0
    chunk_size: PositiveInt | None = None

    couples_rows = True

    def __post_init__(self) -> None:
        self.thresholds = list(self.threshold) if isinstance(self.threshold, list) else [self.threshold]
        if not self.thresholds or not all(value >= 0 for value in self.thresholds):
            raise DataError(f"fsd: threshold is {self.threshold}; give one or more numbers of at least 0.")
        self._distance = divergence_rows(self.divergence)
        self._function = RowFunction(self._rows, count=3)

    def _rows(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return D, e and the anchor's KL: [3, n]."""
        distance = self._distance(log_p, log_q)
        if self.temperature != 1.0:
            log_p = (log_p / self.temperature).log_softmax(-1)
        if self.width is None:
            if self.temperature != 1.0:
                log_q = (log_q / self.temperature).log_softmax(-1)
            exact = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        else:  # 1−(1−q)^k, precise for tiny q and finite for q that rounds to 1; children are drawn from raw q
            missed = torch.expm1(self.width * torch.log1p(-log_q.exp().clamp_max(_ALMOST_ONE)))
            exact = -torch.linalg.vecdot(log_p.exp(), missed)
        return torch.stack([distance, exact, _kl_pq(log_p, log_q)])

    def __call__(self, batch: DraftBatch) -> LossOutput:
        rows, chains = batch.rows, batch.rows.chains  # chains: [S, C]
        values, agree = chunked_rows(self._function, batch, self.chunk_size)  # [3, R], [R]
        distance, exact, kl = values[0], values[1], values[2]  # D, e and the anchor's KL
        parts = {"acceptance": batch_mean(exact, rows), "kl_pq_loss": batch_mean(kl, rows)}
        loss = self.anchor * weighted_mean(kl, rows)
        distance, exact = distance[chains], exact[chains]  # [S, C] each
        for threshold in self.thresholds if chains.numel() else ():
            gate = soft_gate(distance, threshold, self.softness)  # [S, C]
            lengths = expected_length(exact + (1 - exact) * gate)  # [C]
            log_share = (lengths / len(chains)).clamp_min(torch.finfo(lengths.dtype).tiny).log()  # ln(L/S)
            total = rows.chain_total.clamp_min(TINY) * len(self.thresholds)
            loss = loss - (log_share * rows.chain_weight).sum() / total
            weight = rows.chain_weight / rows.chain_weight.sum().clamp_min(TINY)  # [C], 0 in padding
            parts[f"soft_tau_{threshold:g}"] = 1 + (lengths.detach() * weight).sum()
        return with_features(self.w_feature, batch, LossOutput(loss, parts, agree))
