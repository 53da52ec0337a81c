"""CUDA graphs: what a function launches is recorded once and replayed, one launch instead of a thousand.

A recording fixes shapes and addresses. So whatever it reads and changes lies in tensors that stay, and the keys and
values of models in memory that successive requests share. :mod:`fsd_infer.engine.recording` records whole rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from fsd_core.former import Renamed
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.pool import KVPool

SLOTS = 256  # least number of slots of a row's shared memory, which doubles as needed

Outputs = tuple[Tensor, ...]

# Runs a function of no arguments twice, records its launches the second time, and returns what it returned then and a
# function that replays the launches, which updates these outputs in place. The generator, if any, makes its draws.
GraphRecorder = Callable[[Callable[[], Outputs], torch.Generator | None], tuple[Outputs, Callable[[], Any]]]


def shared_slots(slots: int) -> int:
    """Return the slots per row of memory for requests of up to so many; those of similar length share recordings."""
    return max(SLOTS, 1 << (slots - 1).bit_length())


class CudaRecorder:
    """torch's CUDA graphs of one device, in one memory pool, since no two of them run at the same time.

    The pool lives as long as any of its graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # one for all recordings: cuBLAS keeps memory for each stream. torch's own may be another device's.
        self._stream = torch.cuda.Stream(device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(
        self, run: Callable[[], Outputs], generator: torch.Generator | None = None
    ) -> tuple[Outputs, Callable[[], Any]]:
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # a library's first call initialises it and cannot be recorded
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            if generator is not None:
                graph.register_generator_state(generator)
            pool = next((earlier.pool() for earlier in self._graphs), None)
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                outputs = run()
        self._graphs.add(graph)
        return outputs, graph.replay


class CachedModel(Renamed, ABC):
    """A model with a KV cache of slots.

    Attributes:
        recorder: records rounds with this model; None: they run eagerly.
        recorded: the recordings, see :mod:`fsd_infer.engine.recording`.
        cache_config: a config that says how many layers have keys and values.
        device: device of the model.
    """

    former_members = {"held_bytes": "shared_cache_bytes"}
    recorder: GraphRecorder | None = None
    recorded: Any = None
    cache_config: Any
    device: torch.device

    @abstractmethod
    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        """Run the model over a single token, with ``zero`` [1, 1] as its id and its position."""

    def use_graphs(self, recorder: GraphRecorder | None) -> None:
        """Record rounds with this model, or no more. Its keys and values then lie in memory that requests share."""
        self.recorder, self.recorded = recorder, None

    @cached_property
    def _arenas(self) -> dict[bool, dict[Any, Tensor]]:
        """Memory of all requests, by whether inference mode holds: only in that mode can it be written."""
        return {True: {}, False: {}}

    @cached_property
    def _pools(self) -> WeakValueDictionary[tuple[int, int, bool], KVPool]:
        """Keys and values that requests share, by rows, slots, and the arena. Those that recordings hold stay."""
        return WeakValueDictionary()

    def slots(self, slots: int) -> int:
        """Return the slots per row that :meth:`new_cache` allocates for a request of this many."""
        return slots if self.recorder is None else shared_slots(slots)

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """Return an empty KV cache with at least ``slots`` slots per row."""
        slots = self.slots(slots)
        if self.recorder is None:
            return SlotCache(self.cache_config, batch, slots)
        mode = torch.is_inference_mode_enabled()
        pool = self._pools.setdefault((batch, slots, mode), KVPool(self._arenas[mode]))
        for allocated in pool.values():
            allocated.zero_()  # NaN of an earlier answer would reach the next one through a masked slot
        return SlotCache(self.cache_config, batch, slots, pool)

    @property
    def shared_cache_bytes(self) -> int:
        """Bytes of the memory that requests share, at most twice those of the largest request so far."""
        parts = [*self._arenas.values(), *(pool.in_arena for pool in self._pools.values())]
        return sum({id(tensor): tensor.nbytes for part in parts for tensor in part.values()}.values())

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the bytes that :meth:`new_cache` takes."""
        return batch * (self.slots(slots) * self.cache_bytes_per_token + self.state_bytes)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes per token in the cache."""
        return self._row_bytes[0]

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row's recurrent layers, which do not grow with the text."""
        return self._row_bytes[1]

    @cached_property
    def _row_bytes(self) -> tuple[int, int]:
        """:attr:`cache_bytes_per_token` and :attr:`state_bytes`.

        They are measured by a forward over one token, since configs do not agree on them.
        """
        cache, zero = SlotCache(self.cache_config, 1, 1), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache.set_write_slots(zero, 0, 1)
        with torch.no_grad():
            self._read_one(cache, torch.ones(1, 1, 1, dtype=torch.bool, device=self.device), zero)
        return cache.nbytes - cache.state_bytes, cache.state_bytes
