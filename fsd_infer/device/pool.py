"""Where the tensors of a request's caches are allocated, and kept between requests for recorded rounds."""

from __future__ import annotations

from collections.abc import Sequence
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
            self.arena.pop(key, None)  # which frees it, unless something uses it
            self.arena[key] = like.new_empty(count)
        self.in_arena[key] = self.arena[key]
        self[key] = self.in_arena[key][:count].view(*shape).zero_()
        return self[key]
