"""Forwards recorded as CUDA graphs and replayed: the host launches one thing instead of a thousand.

A recording fixes shapes and addresses. So a forward gets its inputs in buffers of its own, padded to one of a few
counts of tokens and of visible slots, and its keys and values lie in memory that requests share one after the other.
Padding is the last token once more, and what comes out for it is cut off.

Models that look at numbers while they run, and anything else that cannot be recorded, run as they always do.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fsd_infer.device.cache import SlotCache

log = logging.getLogger(__name__)

TOKENS = (*range(1, 9), *range(12, 65, 4))  # a forward over more is no longer bound by its launches
SLOTS = 256  # fewest visible slots of a recording; then their double, and so on
MOST = 256  # recordings of one model that are kept

Outputs = tuple[Tensor, ...]
Step = Callable[..., Outputs]


class Recorder(Protocol):
    """Runs a function without arguments, keeps what it launches, and returns its outputs and a way to launch it again,
    which renews them in place.
    """

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], Any]]: ...


class CudaRecorder:
    """torch's CUDA graphs of one device, all in one memory pool: no two of them run at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._first: torch.cuda.CUDAGraph | None = None  # kept: a pool ends with the last of its graphs

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], Any]]:
        with torch.cuda.device(self.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                run()  # libraries set themselves up in their first call, which cannot be recorded
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            pool = None if self._first is None else self._first.pool()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                outputs = run()
        self._first = self._first or graph
        return outputs, graph.replay


@dataclass
class _Recording:
    """One shape: its buffers, what comes out, and how to launch it."""

    inputs: Outputs
    visible: Tensor
    slots: Tensor
    outputs: Outputs = ()
    replay: Callable[[], Any] = lambda: None

    def fill(self, visible: Tensor, slots: Tensor, inputs: Outputs) -> None:
        """Put a forward's inputs into the buffers. Padding is the last token again, with the same place and result."""
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
    """Keys and values that requests have one after the other, and what was recorded upon them."""

    rows: int
    slots: int
    pools: dict[Any, Tensor] = field(default_factory=dict)
    recordings: dict[Any, _Recording | None] = field(default_factory=dict)  # None: the shape was met once
    owner: weakref.ref[SlotCache] | None = None

    @property
    def user(self) -> SlotCache | None:
        """The cache that lies here, while anyone has it."""
        return None if self.owner is None else self.owner()

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools.values())


class Graphs:
    """The recordings of one model.

    Args:
        step: ``step(cache, visible, *inputs)`` runs the model over new tokens and returns tensors [B, M, ...]. visible
            is [B, M, S] bool, as in :meth:`Target.forward`, the inputs are [B, M, ...].
        recorder: how to record.

    Attributes:
        refused: why nothing is recorded any more, or None.
    """

    def __init__(self, step: Step, recorder: Recorder) -> None:
        self.step, self.recorder = step, recorder
        self.refused: str | None = None
        self._memories: list[_Memory] = []

    def slots(self, slots: int) -> int:
        """How many slots per row :meth:`cache` takes for a request of so many."""
        return -(-slots // SLOTS) * SLOTS  # requests of about the same length take the same memory

    def cache(self, config: Any, batch: int, slots: int) -> SlotCache:
        """A cache in memory that an earlier request has left, if that is large enough. Memory that is not, goes."""
        if not torch.is_inference_mode_enabled():  # there, tensors cannot be written to that were made within it
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
            pool.zero_()  # an answer that ended in NaN must not reach the next one through a masked slot
        made = SlotCache(config, batch, memory.slots, memory.pools, memory.rows)
        memory.owner = weakref.ref(made)
        return made

    @property
    def held(self) -> int:
        """Bytes of memory that no request has."""
        return sum(memory.nbytes for memory in self._memories if memory.user is None)

    def forget(self) -> None:
        """Drop all recordings: the model has changed."""
        for memory in self._memories:
            memory.recordings.clear()

    def __call__(self, cache: SlotCache, visible: Tensor, *inputs: Tensor) -> Outputs:
        """``step`` over new tokens whose slots the cache knows, replayed where that is possible."""
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
        if key not in memory.recordings:  # it may not come again, and its keys and values may not lie anywhere yet
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
        """Record one shape, with these inputs to run on meanwhile; None if that is not possible."""
        before = cache.slots, cache.start, cache.used
        made = _Recording(
            tuple(_sized(x, size) for x in inputs),
            visible.new_empty(visible.shape[0], size, span),
            _sized(cache.slots, size),
        )
        made.fill(visible, cache.slots, inputs)
        cache.set_write_slots(made.slots, None, span)
        try:
            made.outputs, made.replay = self.recorder(lambda: self.step(cache, made.visible, *made.inputs))
            return made
        except Exception as error:  # torch raises many kinds for what cannot be recorded
            self.refused = str(error).strip().partition("\n")[0]
            log.warning("a forward cannot be recorded as a CUDA graph, so none is: %s", self.refused)
            self.forget()
            return None
        finally:
            cache.set_write_slots(*before)


def new_cache(graphs: Graphs | None, config: Any, batch: int, slots: int) -> SlotCache:
    """:meth:`Graphs.cache`, or without graphs a cache of just so many slots."""
    return SlotCache(config, batch, slots) if graphs is None else graphs.cache(config, batch, slots)


def slots_taken(graphs: Graphs | None, slots: int) -> int:
    """How many slots per row :func:`new_cache` takes."""
    return slots if graphs is None else graphs.slots(slots)


def _sized(like: Tensor, size: int) -> Tensor:
    """[B, M, ...] -> an empty [B, size, ...]."""
    return like.new_empty(like.shape[0], size, *like.shape[2:])
