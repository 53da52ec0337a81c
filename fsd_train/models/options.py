"""Options that training modules share, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsd_infer.errors import DataError
from fsd_train.models.optim import OPTIMIZERS

MAX_UNROLL = 7


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Options of every training module.

    Attributes:
        target: built-in name, directory or hub id.
        lr: peak learning rate.
        optimizer: "adamw", or "muon" (matrices by Muon, vectors by AdamW).
        weight_decay: of matrices; norms and biases have none.
        betas: of AdamW.
        warmup_steps: linear warm-up.
        final_lr: learning rate at the end, as a share of ``lr``.
        time_limit: minutes after which training ends, with the schedule finished: the cosine then follows whichever is
            further, steps or time. None: steps only (reproducible to the bit).
        seed: of initial weights and all draws.

    Raises:
        DataError: a value is out of its range.
    """

    target: str
    lr: float
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 100
    final_lr: float = 0.0
    time_limit: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.target:
            raise DataError("target is empty: give a built-in name, a directory or a hub id.")
        if self.optimizer not in OPTIMIZERS:
            raise DataError(f"unknown optimizer {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}.")
        self._check(
            ("lr", 0 < self.lr < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to 1"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("final_lr", 0 <= self.final_lr <= 1, "between 0 and 1"),
            ("time_limit", self.time_limit is None or 0 < self.time_limit < math.inf, "above 0 minutes, or null"),
            ("seed", 0 <= self.seed < 2**31, "between 0 and 2^31 - 1"),
        )

    def _check(self, *conditions: tuple[str, bool, str]) -> None:
        """Raise DataError for the first option (name, is it within its range, the range) that is not."""
        for name, within, range_ in conditions:
            if not within:
                raise DataError(f"{name} must be {range_}, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(ScheduleOptions):
    """Options of the training of every kind of drafter.

    Attributes:
        loss: name of a loss, or a list of ``{name, weight, args}`` (see :class:`fsd_train.losses.MixLoss`). In
            validation schedules are at their end and no tokens are left out, so that ``val_loss`` means one thing.
        loss_args: arguments of a single loss.
        unroll_steps: how many drafts of a chain the loss sees, 1 to 7.
        step_decay: weight of step s is step_decay^s.
        ema_decay: decay of an exponential moving average of the weights, which is then what is validated and
            exported; None for none.
        eval_steps: chain steps looked at in validation (at least ``unroll_steps``).
        eval_rules: acceptance rules whose expected accepted length and gates are logged in validation (see
            :class:`fsd_train.losses.metrics.RuleMetrics`); "exact" and "fuzzy:js:0.3" by default.

    Raises:
        DataError: a value is out of its range.
    """

    loss: str | list[dict[str, Any]]
    loss_args: dict[str, Any] | None = None
    unroll_steps: int = 1
    step_decay: float = 1.0
    ema_decay: float | None = None
    eval_steps: int = 4
    eval_rules: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            ("unroll_steps", 1 <= self.unroll_steps <= MAX_UNROLL, f"between 1 and {MAX_UNROLL}"),
            ("eval_steps", 1 <= self.eval_steps <= 64, "between 1 and 64"),
            ("step_decay", 0 < self.step_decay <= 1, "above 0 and at most 1"),
            ("ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "between 0 and 1, or null"),
        )
