"""What a family does with the numbers of its LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self


@dataclass(frozen=True)
class LogitForm:
    """Logits are cap · tanh(x · factor / divisor / cap) of the LM head's x. None: left out."""

    factor: float | None = None
    divisor: float | None = None
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Self | None:
        """Read a text config's form, such as Cohere's, Falcon-H1's, Granite's or Gemma's.

        None: logits are what the LM head returns.
        """
        factor = getattr(config, "logit_scale", None) or getattr(
            config, "lm_head_multiplier", None
        )  # cohere, falcon_h1
        divisor = getattr(config, "logits_scaling", None)
        form = cls(factor, divisor, getattr(config, "final_logit_softcapping", None))
        return None if form == cls() else form

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits [..., V] of what the LM head returned."""
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
