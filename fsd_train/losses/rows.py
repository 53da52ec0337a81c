"""Functions of a row's two distributions, evaluated without ever holding [N, Vd].

A *row function* maps log p [n, Vd] and log q [n, Vd] (fp32, normalised over the draft vocabulary, p the target's) to R
values per row, [R, n]. :func:`chunked_rows` evaluates one at all [S, N] rows of a batch, block by block, and knows its
gradient on the estimates. A loss that couples rows (a product along a chain, a batch mean) is then ordinary autograd
on the [R, S, N] values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsd_infer.device.transfer import to_device
from fsd_infer.divergence import Divergence, divergence
from fsd_train.losses.base import DraftBatch

RowFunction = Callable[[Tensor, Tensor], Tensor]  # log p [n, Vd], log q [n, Vd] -> [R, n]

# A block has 1/LIVE of chunk_size's rows: at the peak 6 to 18 tensors of a block's size are alive (logits, both
# log-probabilities, what autograd keeps of the row function), so that 1.3 chunk_size bounds them all.
LIVE = 14


def default_chunk_size(device: str, vocabulary: int) -> int:
    """1024 rows on a CPU, whose caches a block should fit; on accelerators 1 GiB of logits, at most 8192 rows."""
    return 1024 if device == "cpu" else max(1024, min(8192, 2**28 // vocabulary))


def blocks(rows: int, chunk_size: int, live: int = LIVE) -> list[slice]:
    """Slices of ``rows`` so short that ``live`` tensors of a block's size hold no more than ``chunk_size`` rows."""
    size = max(1, chunk_size // live)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def supervised_rows(counted: Tensor, pieces: Sequence[slice], device: torch.device) -> list[list[slice | Tensor]]:
    """Which rows count: [block][step], the block's slice where all of its rows do, else their numbers [n].

    Args:
        counted: [S, N] bool, in host memory.
        pieces: of :func:`blocks`.
        device: of the numbers, which it does not wait for.
    """
    if not pieces:
        return []
    sizes = torch.stack([counted[:, piece].sum(1) for piece in pieces], dim=1).tolist()  # [S, blocks]
    numbers = to_device(counted.nonzero()[:, 1].contiguous(), device)  # step by step, ascending
    found = iter(numbers.split([size for step in sizes for size in step]))
    by_step = [
        [rows if size < piece.stop - piece.start else piece for piece, size, rows in zip(pieces, step, found)]
        for step in sizes
    ]
    return [list(block) for block in zip(*by_step)]


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """No autocast within it."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def within(piece: slice, rows: slice | Tensor) -> slice | Tensor:
    """The same rows counted from the block's first."""
    return slice(None) if isinstance(rows, slice) else rows - piece.start


def _slope(values: Tensor, logits: Tensor, coefficient: Tensor) -> Tensor:
    """The gradient [n, Vd] of Σ coefficient·values, both [R, n], on the logits that they were computed from."""
    return torch.autograd.grad(values, logits, coefficient)[0]


class _ChunkedRows(torch.autograd.Function):
    """See :func:`chunked_rows`.

    With one value per row (R = 1) and a frozen LM head the gradient is taken in forward, while the block's logits are
    at hand, and only scaled in backward. Else backward, which knows the weights that the R values go into the loss
    with, makes a second pass over the blocks, which turns their weighted sum into one gradient: one product with the LM
    head and one [S, N, H] instead of R of each, and the LM head's own gradient [Vd, H] without ever holding logits of
    more than a block.
    """

    @staticmethod
    def forward(
        ctx: Any, estimates: Tensor, weight: Tensor | None, batch: DraftBatch, rows: RowFunction, count: int,
        pieces: Sequence[slice], counted: list[list[slice | Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        steps, length, _ = estimates.shape
        values = torch.zeros(count, steps, length, dtype=torch.float32, device=estimates.device)
        agree = torch.zeros(steps, length, dtype=torch.bool, device=estimates.device)
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad = torch.zeros_like(estimates) if wanted and count == 1 and weight is None else None
        head = batch.draft_head
        for piece, numbers in zip(pieces, counted, strict=True):
            log_p = batch.head(batch.features[piece]).log_softmax(-1)
            best = log_p.argmax(-1)
            for step, block in enumerate(numbers):
                inside = within(piece, block)
                logits = head(estimates[step, block]).detach().requires_grad_(grad is not None)
                agree[step, block] = logits.detach().argmax(-1) == best[inside]
                with torch.set_grad_enabled(grad is not None):
                    found = rows(log_p[inside], logits.log_softmax(-1))
                values[:, step, block] = found.detach()
                if grad is not None:
                    slope = _slope(found, logits, torch.ones_like(found))
                    grad[step, block] = head.grad_hidden(logits.detach(), slope).to(grad.dtype)
                    del slope
                del found, logits  # or they live on beside the next step's
        ctx.unit = grad is not None
        ctx.settings = None if ctx.unit else (batch, rows, pieces, counted)
        ctx.save_for_backward(*([grad] if grad is not None else [estimates] if wanted else []))
        ctx.mark_non_differentiable(agree)
        return values, agree

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, nothing = grads[0], (None,) * 5
        if ctx.unit:
            (unit,) = ctx.saved_tensors
            return (coefficients[0, ..., None] * unit).to(unit.dtype), None, *nothing
        (estimates,) = ctx.saved_tensors
        batch, rows, pieces, counted = ctx.settings
        head = batch.draft_head
        grad = torch.zeros_like(estimates)
        trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(head.weight, dtype=torch.float32) if trained else None
        with full_precision(estimates.device):
            for piece, numbers in zip(pieces, counted, strict=True):
                log_p = batch.head(batch.features[piece]).log_softmax(-1)
                for step, block in enumerate(numbers):
                    hidden = estimates[step, block]
                    logits = head(hidden).detach().requires_grad_()
                    with torch.enable_grad():
                        found = rows(log_p[within(piece, block)], logits.log_softmax(-1))
                    slope = _slope(found, logits, coefficients[:, step, block])
                    grad[step, block] = head.grad_hidden(logits.detach(), slope).to(grad.dtype)
                    if grad_weight is not None:
                        grad_weight += head.grad_weight(logits.detach(), slope, hidden)
                    del found, logits, slope
        return grad, None if grad_weight is None else grad_weight.to(head.weight.dtype), *nothing


def chunked_rows(rows: RowFunction, batch: DraftBatch, chunk_size: int | None, count: int = 1) -> tuple[Tensor, Tensor]:
    """A row function at every row and step of a batch whose weight is not 0.

    Args:
        rows: log p [n, Vd], log q [n, Vd] -> [R, n], differentiable in the second.
        batch: its estimates, and the weight of its ``own_head`` if it has one, are what is differentiated.
        chunk_size: rows whose fp32 logits would fill the memory that may be used: beyond arguments and results the
            peak stays below 1.3·4·chunk_size·Vd bytes (chunk_size ≥ 14). None: :func:`default_chunk_size`.
        count: R.

    Returns:
        (values [R, S, N] fp32, agreement [S, N] bool: both distributions have the same most likely token); 0 and
        False where the weight is 0
    """
    if chunk_size is None:
        chunk_size = default_chunk_size(batch.estimates.device.type, len(batch.head.weight))
    pieces = blocks(batch.weights.shape[1], chunk_size)
    counted = batch.rows.counted.repeat(len(batch.estimates) // len(batch.weights), 1)  # of two drafters
    numbers = supervised_rows(counted, pieces, batch.estimates.device)
    with full_precision(batch.estimates.device):
        own = None if batch.own_head is None else batch.own_head.weight
        values, agree = _ChunkedRows.apply(batch.estimates, own, batch, rows, count, pieces, numbers)
    return values, agree


def divergence_rows(name: str | Divergence) -> RowFunction:
    """D(p, q) as [n] by the shared library's formula. Raises UnknownNameError for an unknown name.

    The plain forms are called directly, since the block is a chunk already and its log-probabilities are finite; the
    top-k forms through the object, which lumps.
    """
    found = divergence(name)
    if found.k is None:
        return found.rows
    return lambda log_p, log_q: found(log_p, log_q, log_probs=True)


def log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """ln Σ_v min(p, q), [n]: the logarithm of the chance that a token drawn from q passes the exact test."""
    return torch.minimum(log_p, log_q).logsumexp(-1)
