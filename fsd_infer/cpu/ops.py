"""The operations that the rest of the package asks of a CPU. Nothing else of this folder is imported from outside.

Each computes by our kernels where these can be had (:mod:`fsd_infer.cpu.kernels`), and in plain torch otherwise: on
other devices, for other data types, under autograd, on processors without AVX512-BF16 and with FSD_KERNELS=0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fsd_infer.cpu.kernels import PLAIN_DIVERGENCES, Kernels, kernels

if TYPE_CHECKING:
    from fsd_infer.cpu.packing import Packed

__all__ = [
    "kernel_kind",
    "likeliest",
    "packed_products",
    "plain_divergence",
    "restore",
    "row_maxima",
    "row_statistics",
    "speed_up",
    "weight_rows",
]


def kernel_kind() -> str | None:
    """Which of our kernels run on this machine: "amx", "avx512", or None for torch alone. Compiles them if needed."""
    compiled = kernels()
    return None if compiled is None else "amx" if compiled.panel == 32 else "avx512"


# rows of logits ---------------------------------------------------------------------------------------------------


def row_maxima(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The largest number of each row and where it first stands.

    Args:
        logits: [..., V]; [M, V] with ``rows``.
        rows: [R] int64, the rows that are meant; None for all.

    Returns:
        (values [...] or [R] in fp32, NaN where a row has one; int64 indices of the same shape, arbitrary for NaN).

    Raises:
        IndexError: a row that is not there.
    """
    compiled = _compiled(logits)
    if compiled is not None:
        highest, best, _ = compiled.row_statistics(logits.contiguous(), rows, log_sum=False)
        return highest, best
    logits = logits if rows is None else logits[rows]
    return logits.amax(-1).float(), logits.argmax(-1)


def row_statistics(logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`row_maxima`, and ln Σ exp of each row in fp32: its largest number where that is infinite or NaN."""
    compiled = _compiled(logits)
    if compiled is not None:
        highest, best, total = compiled.row_statistics(logits.contiguous(), rows)
        assert total is not None
        return highest, best, total
    logits = logits if rows is None else logits[rows]
    return logits.amax(-1).float(), logits.argmax(-1), logits.float().logsumexp(-1)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [..., V] -> (the ``count`` highest log-probabilities [..., count] in fp32, falling; their tokens)."""
    compiled = _compiled(logits)
    if compiled is not None:
        return compiled.likeliest(logits.contiguous(), count)
    values, tokens = logits.topk(count, dim=-1)
    return values.float() - logits.float().logsumexp(-1, keepdim=True), tokens


def plain_divergence(
    name: str, p: Tensor, q: Tensor, ids: Tensor | None, rows: tuple[Tensor | None, Tensor | None] = (None, None)
) -> Tensor | None:
    """D(p, q) per row by the kernels, or None where :mod:`fsd_infer.divergence`, which defines it, has to compute it.

    In torch it is a dozen passes over V, and a fuzzy rule asks every round.

    Args:
        name: of the divergence. Only the five plain forms are known here.
        p: [..., V] logits; [M, V] with ``rows``.
        q: [..., Vd] logits; [I, Vd] with ``rows``.
        ids: [Vd] int64, the tokens that q is about, for forms that are finite where q is 0; None: V = Vd.
        rows: [R] each, which rows of p and of q are compared; None: all, in order.

    Raises:
        IndexError: a row or a token that is not there.
    """
    shapes = [x.shape[:-1] if which is None else which.shape for x, which in zip((p, q), rows, strict=True)]
    width = p.shape[-1] if ids is None else ids.shape[0]
    compiled = _compiled(p, q) if name in PLAIN_DIVERGENCES else None
    if compiled is None or shapes[0] != shapes[1] or q.shape[-1] != width:
        return None
    ids, of_p, of_q = (x if x is None else x.contiguous() for x in (ids, *rows))
    return compiled.divergence(name, p.contiguous(), q.contiguous(), ids, (of_p, of_q))


def _compiled(*logits: Tensor) -> Kernels | None:
    """The kernels, if they take such logits."""
    fits = all(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) for x in logits)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
    return kernels() if fits and not differentiated else None


# models -----------------------------------------------------------------------------------------------------------
# Imported when called: rules and divergences need none of it.


def speed_up(module: nn.Module, release: bool = False, quantize: bool = False) -> None:
    """Prepare a model or head for a CPU (see :func:`fsd_infer.cpu.fused_ops.speed_up`); nothing on other devices."""
    from fsd_infer.cpu.fused_ops import speed_up

    speed_up(module, release, quantize)


def restore(module: nn.Module) -> int:
    """Undo :func:`speed_up`: give each module its own forward and weights back; returns how many had another."""
    from fsd_infer.cpu.packing import restore

    return restore(module)


def packed_products(module: nn.Module) -> list[Packed]:
    """The packed products that a module computes by."""
    from fsd_infer.cpu.packing import packed_in

    return packed_in(module)


def weight_rows(layer: nn.Module, ids: Tensor | None) -> Tensor:
    """Rows ids [K] of a linear layer's or embedding's weight (None: all), packed or not: [K, in]."""
    from fsd_infer.cpu.packing import rows_of

    return rows_of(layer, ids)
