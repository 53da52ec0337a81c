"""Functions of a row's two distributions, evaluated without ever holding [R, Vd].

A *row function* maps the target's log p and the drafter's log q (both [n, Vd], fp32, normalised over the draft
vocabulary) to K values per row, [K, n]. :func:`chunked_rows` evaluates one at all R rows of a batch, block by block,
and knows its gradient on the estimates. A loss that couples rows (a product along a chain, a batch mean) is then
ordinary autograd on the [K, R] values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsd_infer.divergence import Divergence, divergence
from fsd_train.losses.base import DraftBatch

# A block has 1/LIVE of chunk_size's rows: at the peak 6 to 18 tensors of a block's size are alive (logits, both
# log-probabilities, what autograd keeps of the row function), so that 1.3 chunk_size bounds them all.
LIVE = 14
Distributions = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RowFunction:
    """A row function.

    Attributes:
        values: log p [n, Vd], log q [n, Vd] -> [K, n], differentiable in the second.
        count: K.
        slope: of a function with K = 1, the gradient [n, Vd] of its values on the logits of q, from the same arguments,
            which it may overwrite; None for autograd.
        of_p: its first argument is p instead of log p.
        live: tensors of a block's size that are alive at the peak.
    """

    values: Distributions
    count: int = 1
    slope: Distributions | None = None
    of_p: bool = False
    live: int = LIVE


def default_chunk_size(device: str, vocabulary: int) -> int:
    """1024 rows on a CPU, whose caches a block should fit; on accelerators 1 GiB of logits, at most 8192 rows."""
    return 1024 if device == "cpu" else max(1024, min(8192, 2**28 // vocabulary))


@dataclass(frozen=True)
class Block:
    """Positions, and the rows that stand at them."""

    positions: slice
    rows: slice


def blocks(ends: Sequence[int], size: int) -> list[Block]:
    """The rows of whole positions in blocks of at most ``size`` rows (one position at least).

    Args:
        ends: of :class:`fsd_train.losses.base.Rows`.
        size: rows.
    """
    pieces, first = [], 0
    for position in range(1, len(ends)):
        last = position + 1 == len(ends)
        if last or ends[position + 1] - ends[first] > size:
            pieces.append(Block(slice(first, position), slice(ends[first], ends[position])))
            first = position
    return pieces


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast within it."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


class _RowValues(torch.autograd.Function):
    """See :func:`chunked_rows`.

    With one value per row (K = 1) and a frozen LM head the gradient is taken in forward, while the block's logits are
    at hand, and only scaled in backward. Else backward, which knows the weights that the K values go into the loss
    with, makes a second pass over the blocks, which turns their weighted sum into one gradient: one product with the LM
    head and one [R, H] instead of K of each, and the LM head's own gradient [Vd, H] without ever holding logits of more
    than a block.
    """

    @staticmethod
    def forward(
        ctx: Any, estimates: Tensor, weight: Tensor | None, batch: DraftBatch, function: RowFunction,
        pieces: Sequence[Block],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        count, rows = function.count, len(estimates)
        values = torch.zeros(count, rows, dtype=torch.float32, device=estimates.device)
        agree = torch.zeros(rows, dtype=torch.bool, device=estimates.device)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad = torch.zeros_like(estimates) if wanted and count == 1 and weight is None else None
        head = batch.draft_head
        for block in pieces:
            p, logits, agree[block.rows] = _distributions(batch, function, block)
            values[:, block.rows], slope = _values(function, p, logits, grad is not None)
            if grad is not None and slope is not None:
                grad[block.rows] = head.grad_hidden(logits, slope).to(grad.dtype)
            del p, logits, slope  # or they live on beside the next block's
        ctx.unit = grad is not None
        ctx.settings = None if ctx.unit else (batch, function, pieces)
        ctx.save_for_backward(*([grad] if grad is not None else [estimates] if wanted else []))
        ctx.mark_non_differentiable(agree)
        return values, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, nothing = grads[0], (None,) * 3
        if ctx.unit:
            (unit,) = ctx.saved_tensors
            return (coefficients[0, :, None] * unit).to(unit.dtype), None, *nothing
        (estimates,) = ctx.saved_tensors
        batch, function, pieces = ctx.settings
        head = batch.draft_head
        grad = torch.zeros_like(estimates)
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(head.weight, dtype=torch.float32) if trained else None
        with full_precision(estimates.device):
            for block in pieces:
                p, logits, _ = _distributions(batch, function, block)
                _, slope = _autograd_slope(function, p, logits, coefficients[:, block.rows])
                grad[block.rows] = head.grad_hidden(logits, slope).to(grad.dtype)
                if grad_weight is not None:
                    grad_weight += head.grad_weight(logits, slope, estimates[block.rows])
                del p, logits, slope
        return grad, None if grad_weight is None else grad_weight.to(head.weight.dtype), *nothing


def _distributions(batch: DraftBatch, function: RowFunction, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """log p (or p) and q's logits [n, Vd] at a block's rows, and where both have the same most likely entry [n] bool.

    Of one LM head both are one product: a block's positions alone are too few rows to run at full speed.
    """
    features, estimates = batch.features[block.positions], batch.estimates[block.rows].detach()
    if batch.own_head is None and features.shape[-1] == estimates.shape[-1]:
        dtype = batch.head.weight.dtype
        target, draft = batch.head(torch.cat([features.to(dtype), estimates.to(dtype)])).split(
            [len(features), len(estimates)]
        )
        draft = draft.clone()  # a view would keep the target's logits alive
    else:
        target, draft = batch.head(features), batch.draft_head(estimates).detach()
    at = batch.rows.feature[block.rows] - block.positions.start
    p = (target.softmax(-1) if function.of_p else target.log_softmax(-1)).index_select(0, at)
    return p, draft, draft.argmax(-1) == target.argmax(-1).index_select(0, at)


def _values(function: RowFunction, p: Tensor, logits: Tensor, sloping: bool) -> tuple[Tensor, Tensor | None]:
    """Values [K, n] of a block and, if asked for, their gradient [n, Vd] on the logits (K = 1)."""
    if sloping and function.slope is None:
        return _autograd_slope(function, p, logits, None)
    log_q = logits.log_softmax(-1)
    values = function.values(p, log_q)
    return values, function.slope(p, log_q) if sloping and function.slope is not None else None


def _autograd_slope(
    function: RowFunction, p: Tensor, logits: Tensor, coefficients: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values [K, n], and the gradient [n, Vd] on the logits of their sum weighted by coefficients [K, n] (or 1)."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        values = function.values(p, leaf.log_softmax(-1))
    weights = torch.ones_like(values) if coefficients is None else coefficients
    return values.detach(), torch.autograd.grad(values, leaf, weights)[0]


def chunked_rows(function: RowFunction, batch: DraftBatch, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """A row function at every row of a batch.

    Args:
        function: K values a row.
        batch: its estimates, and the weight of its ``own_head`` if it has one, are what is differentiated.
        chunk_size: rows whose fp32 logits would fill the memory that may be used: beyond arguments and results the
            peak stays below 1.3·4·chunk_size·Vd bytes where a position's rows are fewer than a block's. None:
            :func:`default_chunk_size`.

    Returns:
        (values [K, R] fp32, agreement [R] bool: both distributions have the same most likely token)
    """
    if chunk_size is None:
        chunk_size = default_chunk_size(batch.estimates.device.type, len(batch.head.weight))
    pieces = blocks(batch.rows.ends, max(1, chunk_size // function.live))
    with full_precision(batch.estimates.device):
        own = None if batch.own_head is None else batch.own_head.weight
        values, agree = _RowValues.apply(batch.estimates, own, batch, function, pieces)
    return values, agree


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return torch.linalg.vecdot(log_a.exp(), log_a - log_b)


# the shared library's formulas without what they do for probabilities of 0, which a softmax does not give
_FINITE: dict[str, Distributions] = {"kl_pq": _kl, "kl_qp": lambda log_p, log_q: _kl(log_q, log_p)}


def divergence_rows(name: str | Divergence) -> Distributions:
    """D(p, q) as [n] by the shared library's formula. Raises UnknownNameError for an unknown name.

    The plain forms are called directly, since the block is a chunk already and its log-probabilities are finite; the
    top-k forms through the object, which lumps.
    """
    measure = divergence(name)
    if measure.k is None:
        return _FINITE.get(measure.name, measure.rows)
    return lambda log_p, log_q: measure(log_p, log_q, log_probs=True)


def log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """ln Σ_v min(p, q), [n]: the logarithm of the chance that a token drawn from q passes the exact test."""
    return torch.minimum(log_p, log_q).logsumexp(-1)
