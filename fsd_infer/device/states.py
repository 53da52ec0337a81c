"""What recurrent layers keep of a text: one state per row, whatever the text's length.

A state cannot be read "up to a token" as keys and values can. So a draft tree is verified by *replay*: the states stay
those of the text while every node is computed from them along its ancestors, and the nodes' inputs are kept. A commit
applies the recurrence to the inputs of the accepted path. A round whose drafts are all rejected, or that has none,
commits its root in the same way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fsd_core.functional import at_nodes
from fsd_infer.device.pool import RowTensors

STATE = "recurrent"  # begins the keys of states among the tensors of a cache
PIECE = 64  # tokens of a text that are read at once; memory grows with its square

Inputs = tuple[Tensor, ...]  # [B, M, ...] each


@dataclass(frozen=True)
class Branches:
    """How M new tokens of each row hang together.

    Attributes:
        ancestors: [B, M, M] bool; whether token j is on the path from the first token to i, both included.
        depth: at least the depth of the deepest token.
    """

    ancestors: Tensor
    depth: int

    @cached_property
    def depths(self) -> Tensor:
        """[B, M]"""
        return self.ancestors.sum(-1) - 1

    def up(self, steps: int) -> Tensor:
        """Return [B, M], the ancestor ``steps`` above each token; below 0 in the text, whose last token is -1."""
        depth = self.depths - steps
        is_it = self.ancestors & (self.depths[:, None] == depth[..., None])
        return torch.where(depth >= 0, is_it.int().argmax(-1), depth)

    def along(self, values: Tensor) -> Tensor:
        """Return the sums of values [B, M, ...] over each token's ancestors and itself."""
        return torch.einsum("bij,bj...->bi...", self.ancestors.to(values.dtype), values)


def chain_of(tokens: Tensor) -> Branches:
    """Return tokens [B, M, ...] that follow each other."""
    batch, count = tokens.shape[:2]
    causal = torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril()
    return Branches(causal.expand(batch, -1, -1), count - 1)


class Recurrence(Protocol):
    """A kind of recurrent layer, with the parameters of one of its layers."""

    def initial(self, inputs: Inputs) -> Tensor:
        """Return the state [B, ...] of an empty text."""
        ...

    def tree(self, state: Tensor, inputs: Inputs, branches: Branches) -> Tensor:
        """Return the outputs [B, M, ...] of tokens that follow the state's text, each after its own ancestors."""
        ...

    def chain(self, state: Tensor, inputs: Inputs, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, M, ...] of tokens that follow each other, and the state after ``counts`` [B] of them.

        Outputs of later tokens mean nothing.
        """
        ...


class RecurrentStates:
    """The states of all recurrent layers, each a tensor [B, ...] that stays in its place.

    Args:
        tensors: tensors that hold the states of the batch, other than keys and values.

    Attributes:
        branches: how the next forward's tokens hang together; None: they continue the text, and are committed at once.
        counts: [B] how many of the tokens that continue the text are real; None: all.
    """

    def __init__(self, tensors: RowTensors) -> None:
        self._tensors = tensors
        self.branches: Branches | None = None
        self.counts: Tensor | None = None
        self.kept: dict[Hashable, tuple[Recurrence, Inputs]] = {}

    def run(self, name: Hashable, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Return a layer's outputs [B, M, ...] for the next tokens' inputs."""
        state = self._state(name, recurrence, inputs)
        if self.branches is not None:
            self.kept[name] = recurrence, inputs
            return recurrence.tree(state, inputs, self.branches)
        outputs, batch, length = [], *inputs[0].shape[:2]
        counts = inputs[0].new_full((batch,), length, dtype=torch.long) if self.counts is None else self.counts
        for start in range(0, length, PIECE):
            piece = tuple(x[:, start : start + PIECE] for x in inputs)
            output, after = recurrence.chain(state, piece, (counts - start).clamp(0, piece[0].shape[1]))
            outputs.append(output)
            state.copy_(after)
        return torch.cat(outputs, 1)

    def commit(self, path: Tensor, accepted: Tensor) -> None:
        """Apply the recurrences to the root and the first ``accepted`` [B] nodes after it on the path [B, D+1]."""
        for name, (recurrence, inputs) in self.kept.items():
            state = self._state(name, recurrence, inputs)
            _, after = recurrence.chain(state, tuple(at_nodes(x, path) for x in inputs), accepted + 1)
            state.copy_(after)
        self.kept.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """What a commit changes in place."""
        return [tensor for key, tensor in self._tensors.held.items() if key[0] == STATE]

    def _state(self, name: Hashable, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Return the state [B, ...] of a layer, which is zero if it is new."""
        key = STATE, name
        if key not in self._tensors.held:
            initial = recurrence.initial(inputs)
            self._tensors.get(key, initial, 1, initial.shape[1:])
        return self._tensors.held[key][0]
