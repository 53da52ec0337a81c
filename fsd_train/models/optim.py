"""Optimisers and their schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from fsd_infer.errors import DataError

OPTIMIZERS = ("adamw", "muon")


class MuonAdamW(Optimizer):
    """Muon (Jordan 2024) for matrices and AdamW for the rest, as one optimiser with one list of parameter groups.

    Either list may be empty: a LoRA adapter has matrices alone.

    Muon's update is scaled so that its root mean square is that of AdamW's (Liu et al., arXiv 2502.16982), so one
    learning rate serves both.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(list(matrices), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(AdamW(list(others), lr=lr, weight_decay=0.0, betas=betas))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # the very same dicts, so that a scheduler's learning rate reaches both parts
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def build_optimizer(
    name: str,
    parameters: Sequence[Tensor],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    tables: Sequence[Tensor] = (),
) -> Optimizer:
    """The optimiser called ``name`` ("adamw" or "muon"); vectors (norms, biases) get no weight decay.

    Matrices in ``tables``, with a row per token, are not for Muon: with it they are AdamW's, without weight decay.
    """
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    if name == "muon":
        rows = {id(table) for table in tables}
        others += [parameter for parameter in matrices if id(parameter) in rows]
        return MuonAdamW(
            [parameter for parameter in matrices if id(parameter) not in rows], others, lr, weight_decay, betas
        )
    if name == "adamw":
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        on_cuda = all(parameter.device.type == "cuda" for parameter in parameters)
        return AdamW(groups, lr=lr, betas=betas, fused=True if on_cuda else None)  # one kernel for the whole step
    raise DataError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}.")


def cosine_factor(step: int, warmup: int, share: float, floor: float) -> float:
    """Factor on the peak learning rate: a half cosine from 1 to ``floor`` over the run, times a linear warm-up.

    Args:
        step: from 0.
        warmup: steps of the warm-up.
        share: how much of the run has passed, 0 to 1.
        floor: factor at the end.
    """
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return min((step + 1) / (warmup + 1), 1.0) * cosine
