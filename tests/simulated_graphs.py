"""CUDA graphs of the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.simulated_device import SimulatedDevice, tensors_in


class Graph:
    """What was launched while it was captured, to be launched again on the same memory, and nothing else.

    Attributes:
        reads: addresses of the memory that it reads or writes and did not allocate.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.reads: set[int] = set()
        self.outputs: tuple[Tensor, ...] = ()
        self._own: set[int] = set()

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self.reads |= {address(x) for x in tensors_in((args, *kwargs.values()))} - self._own
        if func.is_view:
            return
        aliased = any(found.alias_info is not None for found in func._schema.returns)
        made = [] if aliased else tensors_in(out)
        self._own |= {address(x) for x in made}
        self.steps.append((func, args, kwargs, made))

    def replay(self) -> None:
        for func, args, kwargs, made in self.steps:
            out = func(*args, **kwargs)
            for before, now in zip(made, tensors_in(out)):
                before.copy_(now)

    def spoil(self) -> None:
        """Graphs share a pool: whatever runs next may write over what this one has put out."""
        for out in self.outputs:
            out.value.fill_(torch.nan if out.is_floating_point() else 0)  # type: ignore[attr-defined]


class SimRecorder:
    """Records graphs of the device, as :class:`fsd_infer.device.cuda_graphs.CudaRecorder` does those of CUDA."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.graphs: list[Graph] = []
        self.replayed = 0

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        run()
        self.device.graph = graph = Graph()
        try:
            graph.outputs = run()
        finally:
            self.device.graph = None
        graph.spoil()  # a capture computes nothing
        self.graphs.append(graph)

        def replay() -> None:
            for other in self.graphs:
                other.spoil()
            self.replayed += 1
            graph.replay()

        return graph.outputs, replay


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
