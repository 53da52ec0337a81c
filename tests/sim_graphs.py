"""Graphs of the simulated device: what was launched while one was captured is launched again, on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.simulated_device import SimulatedDevice, tensors_in


class Graph:
    """What was launched while it was captured, to be launched again on the same memory, and nothing else.

    Attributes:
        reads: addresses of the memory that it reads or writes and did not allocate.
        generators: addresses of the registered random generators.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.reads: dict[int, str] = {}
        self.outputs: tuple[Tensor, ...] = ()
        self.generators = set() if generator is None else {generator._cdata}  # type: ignore[attr-defined]
        self._own: set[int] = set()

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for x in tensors_in((args, *kwargs.values())):
            place = address(x)
            if place not in self._own and place not in self.reads:
                self.reads[place] = f"{func} of {tuple(x.shape)}"
        if func.is_view:
            return
        aliased = any(found.alias_info is not None for found in func._schema.returns)
        made = [] if aliased else tensors_in(out)
        self._own |= {address(x) for x in made}
        self.steps.append((func, args, kwargs, made))

    def replay(self) -> None:
        with _disable_current_modes():  # the tensors are plain
            for func, args, kwargs, made in self.steps:
                out = func(*args, **kwargs)
                for before, now in zip(made, tensors_in(out)):
                    before.copy_(now)

    def spoil(self) -> None:
        """Graphs share a pool: this one's outputs may lie where one that was captured before has had its own values."""
        for out in (x for x in self.outputs if address(x.value) in self._own):  # type: ignore[attr-defined]
            out.value.fill_(torch.nan if out.is_floating_point() else 0)  # type: ignore[attr-defined]


class SimRecorder:
    """Records graphs of the device, as :class:`fsd_infer.device.cuda_graphs.CudaRecorder` does those of CUDA."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.graphs: list[Graph] = []
        self.replayed = 0

    def __call__(self, run: Callable[[], Any], generator: torch.Generator | None) -> tuple[Any, Callable[[], None]]:
        run()
        self.device.graph = graph = Graph(generator)
        try:
            graph.outputs = run()
        finally:
            self.device.graph = None
        graph.spoil()  # a capture computes nothing
        self.graphs.append(graph)

        def replay() -> None:
            for other in self.graphs[self.graphs.index(graph) :]:
                other.spoil()
            self.replayed += 1
            graph.replay()

        return graph.outputs, replay


def address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
