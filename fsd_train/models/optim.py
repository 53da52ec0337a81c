"""An optimizer and a learning rate schedule in addition to torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsd_core.errors import DataError
from fsd_train.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, ShareOrNone


class MuonAdamW(Optimizer):
    """Muon (Jordan 2024) for matrices and AdamW for the rest, as one optimizer with one list of parameter groups.

    Muon's update has the root mean square of AdamW's (Liu et al., arXiv 2502.16982), so both share a learning rate.

    Args:
        params: groups of parameters. AdamW also updates matrices of groups with ``table`` true (a row per token).
        lr: learning rate of both.
        weight_decay: weight decay of Muon's matrices.
        betas: AdamW's betas.

    Raises:
        DataError: a parameter is sharded.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: PositiveFloat = 1e-3,
        weight_decay: NonNegativeFloat = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        lr, weight_decay = float(lr), float(weight_decay)
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for group in (param if isinstance(param, dict) else {"params": [param]} for param in params):
            for parameter in group["params"]:
                if isinstance(parameter, DTensor):
                    raise DataError("Muon needs whole matrices, but fsdp shards them. Use AdamW, or ddp.")
                (matrices if parameter.ndim == 2 and not group.get("table") else others).append(parameter)
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(AdamW(others, lr=lr, weight_decay=0.0, betas=betas))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # the same dict objects, so that a scheduler's learning rate reaches both parts
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


class WarmupCosine(LRScheduler):
    """A linear warm-up times a half cosine, which ends with the run's steps or time, whichever comes first.

    Args:
        optimizer: optimizer with the peak learning rates.
        warmup_steps: length of the warm-up.
        warmup_ratio: share of the run, 0 to 1, instead of ``warmup_steps``.
        final_lr: learning rate at the end, as a share of the peak.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_steps: NonNegativeInt = 100,
        final_lr: ShareOrNone = 0.0,
        warmup_ratio: ShareOrNone | None = None,
    ) -> None:
        self.final_lr = float(final_lr)  # checkpoints hold plain numbers
        self.warmup_ratio = None if warmup_ratio is None else float(warmup_ratio)
        self.warmup_steps = int(warmup_steps) if warmup_ratio is None else 0
        self._completed_share: Callable[[int], float] | None = None
        super().__init__(optimizer)

    def follow(self, completed_share: Callable[[int], float]) -> None:
        """Set the function from a step to the completed share of the run at its begin, 0 to 1."""
        self._completed_share = completed_share

    def get_lr(self) -> list[float | Tensor]:
        step = self.last_epoch
        completed = 0.0 if self._completed_share is None else self._completed_share(step)
        factor = cosine_factor(step, self.warmup_steps, completed, self.final_lr)
        if self.warmup_ratio and self._completed_share is not None:
            factor *= min(self._completed_share(step + 1) / self.warmup_ratio, 1.0)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "_completed_share"}


def cosine_factor(step: int, warmup: int, share: float, floor: float) -> float:
    """Return the factor on the peak learning rate: a half cosine from 1 to ``floor`` times a linear warm-up.

    Args:
        step: step, from 0.
        warmup: steps of the warm-up.
        share: completed share of the run, 0 to 1.
        floor: factor at the end.
    """
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return min((step + 1) / (warmup + 1), 1.0) * cosine
