"""The kernels' answers for :mod:`fsd_core.functional`: NotImplemented where plain torch has to compute.

That is for dtypes other than bf16 and fp32, under autograd, without AVX512-BF16, and with FSD_KERNELS=0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_infer.backends.cpu.kernels import PLAIN_DIVERGENCES, Kernels, TreeTensors, kernels

_FEW_LARGEST = 256  # the kernel inserts into a sorted list, which is slower than torch's selection for more


def row_max(logits: Tensor, rows: Tensor | None = None) -> Any:
    compiled = _compiled(logits)
    return NotImplemented if compiled is None else compiled.row_statistics(logits.contiguous(), rows, log_sum=False)[:2]


def row_stats(logits: Tensor, rows: Tensor | None = None) -> Any:
    compiled = _compiled(logits)
    return NotImplemented if compiled is None else compiled.row_statistics(logits.contiguous(), rows)


def row_entropy(logits: Tensor, rows: Tensor | None = None) -> Any:
    compiled = _compiled(logits)
    return NotImplemented if compiled is None else compiled.row_entropies(logits.contiguous(), rows)


def topk_logprobs(logits: Tensor, k: int) -> Any:
    compiled = _compiled(logits)
    return NotImplemented if compiled is None else compiled.likeliest(logits.contiguous(), k)


def keep_top_k(scores: Tensor, k: int, other: float = -math.inf) -> Any:
    compiled = _compiled(scores) if scores.dtype == torch.float32 and k <= _FEW_LARGEST else None
    return NotImplemented if compiled is None else compiled.keep_largest(scores.contiguous(), k, other)


def divergence_rows(
    p_logits: Tensor,
    q_logits: Tensor,
    measure: Any,
    draft_ids: Tensor | None = None,
    rows: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Any:
    """Take the five plain forms, over a reduced vocabulary those that are finite where q is 0."""
    if measure.name not in PLAIN_DIVERGENCES or draft_ids is not None and measure.infinite_on_reduced_vocabulary:
        return NotImplemented
    pair = tuple(zip((p_logits, q_logits), rows, strict=True))
    shapes = [x.shape[:-1] if which is None else which.shape for x, which in pair]
    width = p_logits.shape[-1] if draft_ids is None else draft_ids.shape[0]
    compiled = _compiled(p_logits, q_logits)
    if compiled is None or shapes[0] != shapes[1] or q_logits.shape[-1] != width:
        return NotImplemented
    ids = None if draft_ids is None else draft_ids.long().contiguous()  # files may store narrower integers
    of_p, of_q = (None if which is None else which.contiguous() for which in rows)
    return compiled.divergence(measure.name, p_logits.contiguous(), q_logits.contiguous(), ids, (of_p, of_q))


def ancestors(parents: Tensor) -> Any:
    compiled = kernels()
    return NotImplemented if compiled is None else compiled.ancestors(parents.contiguous())


def tree_union(main: TreeTensors, side: TreeTensors, mains: int, depth: int) -> Any:
    """Take scores in fp32. In torch the union takes forty small operations."""
    compiled = kernels() if main[2].dtype == side[2].dtype == torch.float32 else None
    return NotImplemented if compiled is None else compiled.union(main, side, mains)


def _compiled(*logits: Tensor) -> Kernels | None:
    """Return the kernels if they can read these logits, else None."""
    fits = all(x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) for x in logits)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in logits)
    return kernels() if fits and not differentiated else None


def register() -> None:
    """Let the kernels answer on CPUs."""
    for kernel in (
        row_max, row_stats, row_entropy, topk_logprobs, keep_top_k, divergence_rows, ancestors, tree_union,
    ):  # fmt: skip
        functional.register(kernel.__name__, "cpu", kernel)
