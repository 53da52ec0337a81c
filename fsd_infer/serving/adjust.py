"""OpenAI's edits of the logits: a bias per token, and penalties for tokens that the answer contains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsd_infer.errors import FsdError


@dataclass(frozen=True)
class Adjustment:
    """The edits that a request asks for.

    Attributes:
        bias: pairs of a token id and the number added to its logit.
        presence: subtracted from the logit of every token that the answer contains.
        frequency: subtracted once per occurrence of the token in the answer.
    """

    bias: tuple[tuple[int, float], ...] = ()
    presence: float = 0.0
    frequency: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.bias or self.presence or self.frequency)

    def check(self, vocab_size: int) -> None:
        """Raise FsdError for a token outside the target's vocabulary."""
        for token, _ in self.bias:
            if not 0 <= token < vocab_size:
                raise FsdError(f"logit_bias: there is no token {token}: ids are from 0 to {vocab_size - 1}.")


class Adjust:
    """A logits processor: ids [M, T], scores [M, V] -> [M, V].

    Args:
        what: the edits.
        start: position in the ids where answers begin.
    """

    def __init__(self, what: Adjustment, start: int) -> None:
        self.what, self.start = what, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        what = self.what
        if what.presence or what.frequency:
            said = input_ids[:, self.start :]
            counts = torch.zeros_like(scores).scatter_add_(1, said, torch.ones_like(said, dtype=scores.dtype))
            scores = scores - what.frequency * counts - what.presence * (counts > 0)
        if what.bias:
            tokens, values = zip(*what.bias, strict=True)
            bias = torch.tensor(values, dtype=scores.dtype, device=scores.device)
            scores = scores.index_add(1, torch.tensor(tokens, device=scores.device), bias.expand(len(scores), -1))
        return scores
