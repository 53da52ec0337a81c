"""The tensors of a request's caches, and where they are allocated and kept between requests for recorded rounds."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import prod
from typing import Any

from torch import Tensor


class KVPool(dict[Any, Tensor]):
    """Allocations of one size, by kind.

    Args:
        arena: from which all sizes take theirs, since no two requests run at the same time; None: private ones. What
            no longer fits gets a larger tensor there. The earlier one stays while something uses it.
    """

    def __init__(self, arena: dict[Any, Tensor] | None = None) -> None:
        self.arena = arena
        self.in_arena: dict[Any, Tensor] = {}  # tensors of the arena, whose beginnings these are

    def zeros(self, key: Any, shape: Sequence[int], like: Tensor) -> Tensor:
        """Allocate zeros of this shape, and of the type and device of ``like``."""
        if self.arena is None:
            self[key] = like.new_zeros(shape)
            return self[key]
        count = prod(shape)
        if key not in self.arena or self.arena[key].numel() < count:
            self.arena.pop(key, None)  # frees it, unless something uses it
            self.arena[key] = like.new_empty(count)
        self.in_arena[key] = self.arena[key]
        self[key] = self.in_arena[key][:count].view(*shape).zero_()
        return self[key]


class RowTensors:
    """Tensors [X, B, ...] of a batch by key, allocated in a pool on first use.

    Args:
        batch: B.
        pool: allocations of as many rows each.
        parent: the tensors of a batch, and the one row of it that these are, in the same memory.
    """

    def __init__(self, batch: int, pool: KVPool, parent: tuple[RowTensors, int] | None = None) -> None:
        self.batch, self.pool, self.parent = batch, pool, parent
        self._allocated = batch  # rows that were allocated; the first B are in use
        self.held: dict[Any, Tensor] = {}

    def get(self, key: Any, like: Tensor, first: int, rest: Sequence[int]) -> Tensor:
        """Return the tensor [first, B, *rest] of a key, which is zero if it is new.

        ``like``: has its type and device.
        """
        if key not in self.held:
            if self.parent is not None:
                parent, row = self.parent
                self.held[key] = parent.get(key, like, first, rest)[:, row : row + 1]
            else:
                if key not in self.pool:
                    self.pool.zeros(key, (first, self._allocated, *rest), like)
                self.held[key] = self.pool[key][:, : self.batch]
        return self.held[key]

    def row(self, index: int) -> RowTensors:
        """Return one batch row, which shares this memory."""
        return RowTensors(1, KVPool(), (self, index))

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these batch rows [B'] (ascending, on the CPU) and move them up in place."""
        self.batch = len(rows)
        for key, tensor in self.held.items():
            for new, old in enumerate(rows.tolist()):
                if new != old:
                    tensor[:, new] = tensor[:, old]
            self.held[key] = tensor[:, : self.batch]

    def detached(self) -> RowTensors:
        """Return the same tensors, to which :meth:`keep_rows` can be applied separately."""
        result = copy(self)
        result.held = dict(self.held)
        return result
