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
from typing import Any, Protocol

import torch
from torch import Tensor

from fsd_core.tensors import at_nodes
from fsd_infer.device.pool import KVPool

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
        wanted = self.depths - steps
        is_it = self.ancestors & (self.depths[:, None] == wanted[..., None])
        return torch.where(wanted >= 0, is_it.int().argmax(-1), wanted)

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
        batch: B.
        pool: allocations of ``rows`` rows each, made on demand.
        rows: at least ``batch``.
        parent: the states of a batch, and the one row of it that these are.

    Attributes:
        branches: how the next forward's tokens hang together; None: they continue the text, and are committed at once.
        counts: [B] how many of the tokens that continue the text are real; None: all.
    """

    def __init__(self, batch: int, pool: KVPool, rows: int, parent: tuple[RecurrentStates, int] | None = None) -> None:
        self.batch, self.pool, self.rows, self.parent = batch, pool, rows, parent
        self.branches: Branches | None = None
        self.counts: Tensor | None = None
        self.states: dict[Hashable, Tensor] = {}
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
            _, after = recurrence.chain(self.states[name], tuple(at_nodes(x, path) for x in inputs), accepted + 1)
            self.states[name].copy_(after)
        self.kept.clear()

    def row(self, index: int) -> RecurrentStates:
        """Return one batch row, which shares this memory."""
        return RecurrentStates(1, self.pool, self.rows, (self, index))

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these batch rows [B'] (ascending, on the CPU) and move them up in place."""
        self.batch = len(rows)
        for name, state in self.states.items():
            for place, row in enumerate(rows.tolist()):
                if place != row:
                    state[place] = state[row]
            self.states[name] = state[: self.batch]

    def saved(self, row: int) -> dict[Any, Tensor]:
        """Return copies of a row's states, for :meth:`restore`."""
        return {("recurrent", name): state[row].clone() for name, state in self.states.items()}

    def restore(self, states: dict[Any, Tensor]) -> None:
        """Write the result of :meth:`saved` to the only row."""
        for (_, name), state in states.items():
            self.place(name, state[None])[0] = state

    @property
    def tensors(self) -> list[Tensor]:
        """What a commit changes in place."""
        return list(self.states.values())

    @property
    def nbytes(self) -> int:
        """Allocated bytes, 0 before the first forward."""
        return sum(state.nbytes for name, state in self.pool.items() if name[0] == "recurrent")

    def _state(self, name: Hashable, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        return self.states[name] if name in self.states else self.place(name, recurrence.initial(inputs))

    def place(self, name: Hashable, like: Tensor) -> Tensor:
        """Return the tensor [B, ...] of a state, which is zero if it is new."""
        if name not in self.states:
            if self.parent is not None:
                whole, row = self.parent
                self.states[name] = whole.place(name, like)[row : row + 1]
            else:
                key = "recurrent", name
                if key not in self.pool:
                    self.pool.zeros(key, (self.rows, *like.shape[1:]), like)
                self.states[name] = self.pool[key][: self.batch]
        return self.states[name]
