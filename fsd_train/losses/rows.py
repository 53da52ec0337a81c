"""Functions of two distributions per row, evaluated in blocks so that no [R, Vd] tensor exists.

A *row function* maps the target's log p and the drafter's log q (both [n, Vd], fp32, normalised over the draft
vocabulary) to K values per row, [K, n]. :func:`chunked_rows` evaluates it on all R rows of a batch, with gradients.
A loss that couples rows, by a product along a chain for example, applies ordinary autograd to the [K, R] values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsd_core.divergence import Divergence, divergence
from fsd_train.losses.base import TINY, DraftBatch
from fsd_train.shapes import many_shapes

# A block has chunk_size/LIVE rows. At the peak 6 to 18 tensors of its size are alive: logits, log-probabilities and
# tensors saved by autograd. Together they stay below the size of 1.3·chunk_size rows.
LIVE = 14
BACKEND = "inductor"  # of torch.compile
_PART = 4096  # rows of an LM head's gradient that are computed at a time
Distributions = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RowFunction:
    """A row function.

    Attributes:
        values: function of log p and log q [n, Vd] that returns [K, n]; differentiable in log q.
        count: K.
        grad: for K = 1, a function of the same arguments that returns the gradient [n, Vd] on the logits of q and may
            overwrite them; None: use autograd.
        takes_p: take p instead of log p.
        live: number of block-sized tensors alive at the peak.
    """

    values: Distributions
    count: int = 1
    grad: Distributions | None = None
    takes_p: bool = False
    live: int = LIVE

    @classmethod
    def of_one(cls, value: Distributions) -> RowFunction:
        """Return the row function of one value per row, given as a function that returns [n]."""
        return cls(lambda log_p, log_q: value(log_p, log_q)[None])

    @cached_property
    def compiled(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """:meth:`of_logits`, compiled for each shape."""
        return torch.compile(self.of_logits, dynamic=False, backend=BACKEND)

    def of_logits(self, target: Tensor, at: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [K, n], and whether both have the same most likely token [n].

        Args:
            target: [m, Vd] logits of p at m positions.
            at: [n] position of each row.
            logits: [n, Vd] logits of q; differentiable.
        """
        p = (target.softmax(-1) if self.takes_p else target.log_softmax(-1)).index_select(0, at)
        values = self.values(p, logits.log_softmax(-1))
        return values, logits.detach().argmax(-1) == target.argmax(-1).index_select(0, at)


def default_chunk_size(device: str, vocabulary: int) -> int:
    """Return 1024 rows on a CPU, so that blocks fit its caches; elsewhere rows for 1 GiB of logits, at most 8192."""
    return 1024 if device == "cpu" else max(1024, min(8192, 2**28 // vocabulary))


@dataclass(frozen=True)
class Block:
    """Consecutive positions and their rows."""

    positions: slice
    rows: slice


Groups = Sequence[Sequence[Block]]


def blocks(offsets: Sequence[int], max_rows: int) -> list[Block]:
    """Divide the rows into blocks of whole positions.

    Args:
        offsets: as in :class:`fsd_train.losses.base.LossIndex`.
        max_rows: most rows of a block with more than one position.
    """
    result, first = [], 0
    for position in range(1, len(offsets)):
        is_last = position + 1 == len(offsets)
        if is_last or offsets[position + 1] - offsets[first] > max_rows:
            result.append(Block(slice(first, position), slice(offsets[first], offsets[position])))
            first = position
    return result


def equal_blocks(offsets: Sequence[int], max_rows: int) -> list[Block]:
    """Divide padded rows (:attr:`.DraftBatch.compiled`) into blocks of the same shape.

    Args:
        offsets: multiples of the number of rows of a position.
        max_rows: most rows of a block with more than one position.
    """
    positions, steps = len(offsets) - 1, max(offsets[1], 1)  # a row per step
    count = next(n for n in range(min(max(max_rows // steps, 1), positions), 0, -1) if positions % n == 0)
    starts = range(0, positions, count)
    return [Block(slice(first, first + count), slice(first * steps, (first + count) * steps)) for first in starts]


def grouped(row_blocks: Sequence[Block], max_rows: int) -> list[list[Block]]:
    """Group consecutive blocks into at most ``max_rows`` rows, or one block."""
    groups: list[list[Block]] = []
    for block in row_blocks:
        if not groups or block.rows.stop - groups[-1][0].rows.start > max_rows:
            groups.append([])
        groups[-1].append(block)
    return groups


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast."""
    has_autocast = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if has_autocast else nullcontext()


class _RowValues(torch.autograd.Function):
    """See :func:`chunked_rows` and :func:`mean_of_rows`.

    Forward takes the gradient while a block's logits are at hand if it knows the weights of the values in the loss:
    with ``row_weights``, or with one value per row and a frozen LM head, whose rows backward scales. Otherwise backward
    makes a second pass over the blocks.
    """

    @staticmethod
    def forward(
        ctx: Any, estimates: Tensor, lm_weight: Tensor | None, row_weights: Tensor | None, batch: DraftBatch,
        function: RowFunction, groups: Groups,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.by_row, ctx.trains_lm_head = row_weights is None, ctx.needs_input_grad[1]
        needs_grad, one_value = any(ctx.needs_input_grad[:2]), function.count == 1 and not ctx.trains_lm_head
        ctx.one_pass = needs_grad and (row_weights is not None or one_value)
        weights = estimates.new_ones(len(estimates), dtype=torch.float32) if row_weights is None else row_weights  # [R]
        if ctx.one_pass:
            values, agree, grads = _evaluate(batch, function, groups, weights[None], ctx.trains_lm_head)
            ctx.save_for_backward(*grads)
        else:
            values, agree, _ = _evaluate(batch, function, groups, None, False)
            ctx.second_pass = batch, function, groups
        total = (values[0] * weights).sum()
        ctx.mark_non_differentiable(agree, total if ctx.by_row else values)
        return values, agree, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values_grad, _, total_grad = grads  # [K, R], scalar
        if ctx.one_pass:
            factor = values_grad[0, :, None] if ctx.by_row else total_grad
            input_grads = [(factor * saved).to(saved.dtype) for saved in ctx.saved_tensors]
        else:
            batch, function, groups = ctx.second_pass
            input_grads = _evaluate(batch, function, groups, values_grad, ctx.trains_lm_head)[2]
        return input_grads[0], input_grads[1] if len(input_grads) > 1 else None, None, None, None, None


@torch.no_grad()
def _evaluate(
    batch: DraftBatch, function: RowFunction, groups: Groups, weights: Tensor | None, trains_lm_head: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Evaluate all rows, block by block, and accumulate gradients.

    Args:
        batch: the rows.
        function: K values per row.
        groups: blocks by group. Each group adds once to the LM head's fp32 gradient, which costs a pass over [Vd, H].
        weights: [K, R] weights of the values in the loss; None: compute no gradient.
        trains_lm_head: also compute the gradient on the LM head's weight.

    Returns:
        (values [K, R] fp32, agreement [R], gradients on the estimates [R, H] and, if trained, on the LM head's weight)
    """
    estimates, head = batch.estimates, batch.draft_lm_head
    evaluate = _compiled_block if batch.compiled else _block
    values = torch.zeros(function.count, len(estimates), dtype=torch.float32, device=estimates.device)
    agree = torch.zeros(len(estimates), dtype=torch.bool, device=estimates.device)
    grad = torch.zeros_like(estimates)
    weight_grad = torch.zeros_like(head.weight, dtype=torch.float32) if trains_lm_head else None  # [Vd, H]
    with full_precision(estimates.device):
        for group in groups:
            rows = slice(group[0].rows.start, group[-1].rows.stop)
            # of the LM head's products h Wᵀ at the group's rows: [n, Vd]
            products_grad = head.weight.new_empty(rows.stop - rows.start, len(head.weight)) if trains_lm_head else None
            for block in group:
                here = block.rows
                values[:, here], logits_grad, logits, agree[here] = evaluate(
                    function, batch, block, None if weights is None else weights[:, here]
                )
                if logits_grad is not None and products_grad is None:
                    grad[here] = head.grad_hidden(logits, logits_grad).to(grad.dtype)
                elif logits_grad is not None and products_grad is not None:
                    in_group = slice(here.start - rows.start, here.stop - rows.start)
                    products_grad[in_group] = head.grad_products(logits, logits_grad)
                del logits, logits_grad  # or they stay in memory with the next block's
            if weight_grad is not None and products_grad is not None:
                grad[rows] = (products_grad @ head.weight).to(grad.dtype)
                inputs = estimates[rows].to(products_grad.dtype)
                for part in range(0, len(weight_grad), _PART):
                    weight_grad[part : part + _PART] += products_grad[:, part : part + _PART].mT @ inputs
    return values, agree, [grad] if weight_grad is None else [grad, weight_grad.to(head.weight.dtype)]


def _logits_of(batch: DraftBatch, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Return p's logits [m, Vd] at a block's positions, the position [n] of its rows, and q's logits [n, Vd] there.

    If both share an LM head, one product computes them, because a block has too few positions for full speed.
    """
    features, estimates = batch.features[block.positions], batch.estimates[block.rows].detach()
    if batch.own_lm_head is None and features.shape[-1] == estimates.shape[-1]:
        dtype = batch.target_lm_head.weight.dtype
        target, draft = batch.target_lm_head(torch.cat([features.to(dtype), estimates.to(dtype)])).split(
            [len(features), len(estimates)]
        )
        draft = draft.clone()  # a view would keep the target's logits alive
    else:
        target, draft = batch.target_lm_head(features), batch.draft_lm_head(estimates).detach()
    return target, batch.rows.position_index[block.rows] - block.positions.start, draft


_BlockResult = tuple[Tensor, Tensor | None, Tensor, Tensor]


def _block(function: RowFunction, batch: DraftBatch, block: Block, weights: Tensor | None) -> _BlockResult:
    """Evaluate a block.

    Args:
        function, batch, block: what and where.
        weights: [K, n] weights of the values in the loss; None: compute no gradient.

    Returns:
        (values [K, n], the logits' gradient [n, Vd] of the weighted sum or None, q's logits [n, Vd], agreement [n])
    """
    target, at, logits = _logits_of(batch, block)  # [m, Vd], [n], [n, Vd]
    agree = logits.argmax(-1) == target.argmax(-1).index_select(0, at)
    p = target.softmax(-1) if function.takes_p else target.log_softmax(-1)  # [m, Vd]
    del target
    return *_values_and_grad(function, p.index_select(0, at), logits, weights), logits, agree


def _compiled_block(function: RowFunction, batch: DraftBatch, block: Block, weights: Tensor | None) -> _BlockResult:
    """As :func:`_block`, in one kernel or a few."""
    target, at, logits = _logits_of(batch, block)
    leaf = logits.requires_grad_(weights is not None)
    with torch.set_grad_enabled(weights is not None), many_shapes():
        values, agree = function.compiled(target, at, leaf)
    grad = None if weights is None else torch.autograd.grad(values, leaf, weights)[0]
    return values.detach(), grad, logits.detach(), agree


def _values_and_grad(
    function: RowFunction, p: Tensor, logits: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a block's values and gradient as :func:`_block`, given p (or log p) and q's logits, [n, Vd] each."""
    if weights is None:
        return function.values(p, logits.log_softmax(-1)), None
    if function.grad is not None:
        log_q = logits.log_softmax(-1)
        return function.values(p, log_q), function.grad(p, log_q).mul_(weights[0, :, None])
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        values = function.values(p, leaf.log_softmax(-1))
    return values.detach(), torch.autograd.grad(values, leaf, weights)[0]


def chunked_rows(function: RowFunction, batch: DraftBatch, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """Evaluate a row function at every row of a batch.

    Args:
        function: K values per row.
        batch: differentiable in the estimates and in the weight of ``own_lm_head``, if any.
        chunk_size: memory bound in rows of fp32 logits. Beyond arguments and results the peak stays below
            1.3·4·chunk_size·Vd bytes if a block holds a position's rows. None: :func:`default_chunk_size`.

    Returns:
        (values [K, R] fp32, agreement [R] bool: both distributions have the same most likely token)
    """
    values, agree, _ = _apply(function, batch, chunk_size, None)
    return values, agree


def mean_of_rows(function: RowFunction, batch: DraftBatch, chunk_size: int | None) -> tuple[Tensor, Tensor]:
    """Return Σ w·x / total of a row function with one value per row (:func:`.weighted_mean`), and the agreement [R].

    One pass computes the mean and its gradients, since the weights are known in advance.

    Args:
        function, batch, chunk_size: see :func:`chunked_rows`, with K = 1.
    """
    row_weights = batch.rows.weight.float() / batch.rows.total.clamp_min(TINY)
    _, agree, mean = _apply(function, batch, chunk_size, row_weights)
    return mean, agree


def _apply(
    function: RowFunction, batch: DraftBatch, chunk_size: int | None, row_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the rows into blocks and evaluate them.

    Returns:
        (values [K, R], agreement [R], scalar Σ w·x of the first values with ``row_weights`` [R], by default 1)
    """
    if chunk_size is None:
        chunk_size = default_chunk_size(batch.estimates.device.type, len(batch.target_lm_head.weight))
    divide = equal_blocks if batch.compiled else blocks
    if batch.own_lm_head is None:
        lm_weight = None
        groups = [[block] for block in divide(batch.rows.offsets, max(1, chunk_size // function.live))]
    else:  # of 4·chunk_size·Vd bytes a quarter is for the gradients of a group, three for its blocks
        lm_weight = batch.own_lm_head.weight
        if not torch.is_grad_enabled():  # needs_input_grad is true of a parameter anyway
            lm_weight = lm_weight.detach()
        row_blocks = divide(batch.rows.offsets, max(1, chunk_size * 3 // 4 // function.live))
        groups = grouped(row_blocks, chunk_size // lm_weight.element_size())
    values, agree, total = _RowValues.apply(batch.estimates, lm_weight, row_weights, batch, function, groups)
    return values, agree, total


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return torch.linalg.vecdot(log_a.exp(), log_a - log_b)


# the shared formulas without their handling of zero probabilities, which a softmax never returns
_FINITE: dict[str, Distributions] = {"kl_pq": _kl, "kl_qp": lambda log_p, log_q: _kl(log_q, log_p)}


def divergence_rows(name: str | Divergence) -> Distributions:
    """Return the row function D(p, q) -> [n] of a divergence. Raises UnknownNameError for an unknown name.

    Plain forms skip the object, because blocks need no further chunks; top-k forms need its lumping.
    """
    measure = divergence(name)
    if measure.k is None:
        return _FINITE.get(measure.name, measure.rows)
    return lambda log_p, log_q: measure(log_p, log_q, log_probs=True)


def log_overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ln Σ_v min(p, q) [n], the log probability that a token drawn from q passes the exact test."""
    return torch.minimum(log_p, log_q).logsumexp(-1)
