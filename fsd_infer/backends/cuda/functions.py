"""Triton's answers for :mod:`fsd_core.functional`; NotImplemented where plain torch has to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsd_core import functional
from fsd_infer.backends.cuda import clipped, kernels, trees

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row_max(logits: Tensor) -> Any:
    return kernels.row_max(logits) if _takes(logits) else NotImplemented


def row_stats(logits: Tensor, where: Tensor | None = None) -> Any:
    return kernels.row_stats(logits, where) if _takes(logits) else NotImplemented


def row_entropy(logits: Tensor, where: Tensor | None = None) -> Any:
    return kernels.row_entropy(logits, where) if _takes(logits) else NotImplemented


def topk_logprobs(logits: Tensor, k: int, where: Tensor | None = None) -> Any:
    takes = _takes(logits) and k <= kernels.MAX_LIKELY
    return kernels.topk_logprobs(logits, k, where) if takes else NotImplemented


def search_clipped(log_p: Tensor, log_q: Tensor, gain: Tensor, steps: int, near: float) -> Any:
    takes = _takes(log_p) and log_p.dtype == log_q.dtype == gain.dtype == torch.float32
    return clipped.search_clipped(log_p, log_q, gain, steps, near) if takes else NotImplemented


def ancestors(parents: Tensor) -> Any:
    return trees.ancestors(parents) if parents.numel() else NotImplemented


def slot_masks(lengths: Tensor, visible_after: Tensor, used: int) -> Any:
    return trees.slot_masks(lengths, visible_after, used) if visible_after.numel() and used else NotImplemented


def _takes(logits: Tensor) -> bool:
    differentiated = torch.is_grad_enabled() and logits.requires_grad
    return logits.dtype in _DTYPES and logits.numel() > 0 and not differentiated


def register(device: str) -> None:
    """Let the kernels answer on this type of device."""
    for kernel in (row_max, row_stats, row_entropy, topk_logprobs, search_clipped, ancestors, slot_masks):
        functional.register(kernel.__name__, device, kernel)
