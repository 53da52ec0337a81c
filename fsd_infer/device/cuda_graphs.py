"""Forwards recorded as CUDA graphs and replayed: one launch per forward instead of a thousand.

A recording fixes shapes and addresses. So its inputs are buffers, padded to one of a few numbers of tokens and of
visible slots. Keys and values lie in memory that successive requests reuse. Padding repeats the last token, and its
outputs are dropped.

Models whose forward reads values on the host cannot be recorded and run eagerly.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fsd_infer.device.cache import SlotCache

log = logging.getLogger(__name__)

TOKENS = (*range(1, 9), *range(12, 65, 4))  # forwards over more tokens are not bound by launches
SLOTS = 256  # least number of visible slots of a recording, which doubles as needed
MOST = 256  # most recordings per memory

Outputs = tuple[Tensor, ...]
Step = Callable[..., Outputs]


# Runs a function, records its launches, and returns its outputs and a function that replays them. A replay updates the
# outputs in place.
Recorder = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], Any]]]


class CudaRecorder:
    """torch's CUDA graphs of one device, in one memory pool, since no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the pool alive

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], Any]]:
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()  # a library's first call initialises it and cannot be recorded
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._first is None else self._first.pool()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = run()
        self._first = self._first or graph
        return outputs, graph.replay


@dataclass
class _Recording:
    """One shape: its input buffers, its outputs, and the function that replays it."""

    inputs: Outputs
    visible: Tensor
    slots: Tensor
    outputs: Outputs = ()
    replay: Callable[[], Any] = lambda: None

    def fill(self, visible: Tensor, slots: Tensor, inputs: Outputs) -> None:
        """Copy a forward's inputs to the buffers. Padding repeats the last token, in the same slot."""
        count, used = visible.shape[1:]
        for buffer, given in zip((*self.inputs, self.slots), (*inputs, slots), strict=True):
            buffer[:, :count] = given
        self.visible[:, :count, :used] = visible
        self.visible[:, :, used:] = False
        if count < self.slots.shape[1]:
            for buffer in (*self.inputs, self.slots, self.visible):
                buffer[:, count:] = buffer[:, count - 1 : count]


@dataclass
class _Memory:
    """Keys and values that successive requests reuse, and the recordings on them."""

    rows: int
    slots: int
    pools: dict[Any, Tensor] = field(default_factory=dict)
    recordings: dict[Any, _Recording | None] = field(default_factory=dict)  # None: the shape occurred once
    owner: weakref.ref[SlotCache] | None = None

    @property
    def user(self) -> SlotCache | None:
        """The cache in this memory, while it is in use."""
        return None if self.owner is None else self.owner()

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())


class Graphs:
    """The recordings of one model.

    Args:
        step: ``step(cache, visible, *inputs)`` runs the model over new tokens and returns tensors [B, M, ...]. visible
            is [B, M, S] bool, as in :meth:`Target.forward`; the inputs are [B, M, ...].
        recorder: records a function.

    Attributes:
        refused: why recording failed; None while it works.
    """

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        self.refused: str | None = None
        self._memories: list[_Memory] = []

    def slots(self, slots: int) -> int:
        """Return the slots per row that :meth:`cache` allocates for a request of this many."""
        return -(-slots // SLOTS) * SLOTS  # requests of similar length share memory

    def cache(self, config: Any, batch: int, slots: int) -> SlotCache:
        """Return a cache in an earlier request's memory if that is large enough; free memory that is too small."""
        if not torch.is_inference_mode_enabled():  # inference tensors cannot be written to outside inference mode
            return SlotCache(config, batch, slots)
        slots = self.slots(slots)
        left = [memory for memory in self._memories if memory.user is None]
        memory = next((memory for memory in left if memory.rows >= batch and memory.slots >= slots), None)
        self._memories = [kept for kept in self._memories if kept is memory or kept.user is not None]
        del left
        if memory is None:
            memory = _Memory(batch, slots)
            self._memories.append(memory)
        for pool in memory.pools.values():
            pool.zero_()  # NaN of an earlier answer would reach the next one through a masked slot
        cache = SlotCache(config, batch, memory.slots, memory.pools, memory.rows)
        memory.owner = weakref.ref(cache)
        return cache

    @property
    def held(self) -> int:
        """Bytes of memory that no request uses."""
        return sum(memory.nbytes for memory in self._memories if memory.user is None)

    def forget(self) -> None:
        """Drop all recordings, after a change of the model."""
        for memory in self._memories:
            memory.recordings.clear()

    def __call__(self, cache: SlotCache, visible: Tensor, *inputs: Tensor) -> Outputs:
        """Run ``step`` over new tokens in the cache's write slots; replay a recording if possible."""
        batch, count, used = visible.shape
        memory = next((memory for memory in self._memories if memory.user is cache), None)
        if self.refused or memory is None or count > TOKENS[-1]:
            return self.step(cache, visible, *inputs)
        size = next(size for size in TOKENS if size >= count)
        span = SLOTS
        while span < used:
            span *= 2
        span = min(span, cache.capacity)
        key = batch, size, span, *((x.shape[2:], x.dtype) for x in inputs)
        if key not in memory.recordings:  # record a shape when it recurs, after its keys and values are allocated
            if len(memory.recordings) >= MOST:
                memory.recordings.pop(next(iter(memory.recordings)))
            memory.recordings[key] = None
            return self.step(cache, visible, *inputs)
        recording = memory.recordings[key] or self._record(cache, visible, inputs, size, span)
        if recording is None:
            return self.step(cache, visible, *inputs)
        memory.recordings[key] = recording
        recording.fill(visible, cache.slots, inputs)
        recording.replay()
        return tuple(out[:, :count].clone() for out in recording.outputs)

    def _record(self, cache: SlotCache, visible: Tensor, inputs: Outputs, size: int, span: int) -> _Recording | None:
        """Record one shape with these inputs; None if that is not possible."""
        before = cache.slots, cache.start, cache.used
        recording = _Recording(
            tuple(_sized(x, size) for x in inputs),
            visible.new_empty(visible.shape[0], size, span),
            _sized(cache.slots, size),
        )
        recording.fill(visible, cache.slots, inputs)
        cache.set_write_slots(recording.slots, None, span)
        try:
            run = partial(self.step, cache, recording.visible, *recording.inputs)
            recording.outputs, recording.replay = self.recorder(run)
            return recording
        except Exception as error:  # torch raises many types for operations that cannot be recorded
            self.refused = str(error).strip().partition("\n")[0]
            log.warning("a forward cannot be recorded as a CUDA graph, so none is: %s", self.refused)
            self.forget()
            return None
        finally:
            cache.set_write_slots(*before)


class CachedModel(ABC):
    """A model with a KV cache of slots, whose forwards may be recorded as CUDA graphs.

    Attributes:
        graphs: the recordings; None: forwards run eagerly.
        cache_config: a config that says how many layers have keys and values.
        device: of the model.
    """

    graphs: Graphs | None = None
    cache_config: Any
    device: torch.device

    @abstractmethod
    def _step(self, cache: SlotCache, visible: Tensor, *inputs: Any) -> Outputs:
        """Run the model over new tokens, as :class:`Graphs` takes it."""

    @abstractmethod
    def _read_one(self, cache: SlotCache, visible: Tensor, zero: Tensor) -> None:
        """Run the model over a single token, with ``zero`` [1, 1] as its id and its position."""

    def use_graphs(self, recorder: Recorder) -> None:
        """Record forwards over trees as CUDA graphs and replay them, see :class:`Graphs`."""
        self.graphs = Graphs(self._step, recorder)

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        """Return an empty KV cache with ``slots`` slots per row."""
        if self.graphs is None:
            return SlotCache(self.cache_config, batch, slots)
        return self.graphs.cache(self.cache_config, batch, slots)

    @property
    def held_bytes(self) -> int:
        """Bytes of earlier requests' caches that :meth:`new_cache` may reuse."""
        return 0 if self.graphs is None else self.graphs.held

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the bytes that :meth:`new_cache` takes."""
        return batch * (slots if self.graphs is None else self.graphs.slots(slots)) * self.cache_bytes_per_token

    @cached_property
    def cache_bytes_per_token(self) -> int:
        """Bytes per token in the cache, measured by a forward over one token, since configs do not agree on it."""
        cache, zero = SlotCache(self.cache_config, 1, 1), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        cache.set_write_slots(zero, 0, 1)
        with torch.no_grad():
            self._read_one(cache, torch.ones(1, 1, 1, dtype=torch.bool, device=self.device), zero)
        return cache.nbytes


def _sized(like: Tensor, size: int) -> Tensor:
    """[B, M, ...] -> an empty [B, size, ...]."""
    return like.new_empty(like.shape[0], size, *like.shape[2:])
