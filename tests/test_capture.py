"""Forwards do nothing that CUDA graphs forbid, at every padded count of tokens, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fsd_infer import Target
from fsd_infer.device.cache import SlotCache
from fsd_infer.device.cuda_graphs import TOKENS, Graphs
from tests.families import VOCAB, tiny_head, tiny_model
from tests.simulated_device import SIM, SimulatedDevice, tensors_in


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


TEXT = 5  # tokens in the cache before the tree
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"layout": "eagle3", "draft_vocab_size": 40},
    "fsd": {"fused_layers": [0]},
}
Forward = Callable[[SlotCache, Tensor, Tensor, Tensor], Tensor]  # cache, visible, tokens, positions


def forwards(kind: str, recorder: SimRecorder) -> tuple[Forward, Forward, Graphs, Any, list[torch.nn.Module]]:
    """A recorded forward, the plain one, the recordings, the cache's config, and the modules that hold the weights."""
    family = "llama" if kind in HEADS else kind
    target = Target(tiny_model(family, num_hidden_layers=2).to(SIM))
    if kind not in HEADS:
        target.use_graphs(recorder)
        assert target.graphs is not None

        def run(cache: SlotCache, visible: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
            return target.forward(tokens, positions, visible, cache)[0]

        def plain(cache: SlotCache, visible: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
            return target._step(cache, visible, tokens, positions)[0]

        return run, plain, target.graphs, target.config, [target.model]
    drafter = tiny_head(target, **HEADS[kind])
    drafter.use_graphs(recorder)
    model = drafter.model
    assert model.graphs is not None
    features = torch.randn(2, TOKENS[-1], drafter.head.config.feature_width, device=SIM)

    def of(step: Callable[..., Any]) -> Forward:
        return lambda cache, visible, tokens, positions: step(
            cache, visible, tokens, features[: len(tokens), : tokens.shape[1]], positions
        )

    modules = [drafter.head, target.model]
    return of(model.forward), lambda *given: of(model._step)(*given)[0], model.graphs, model.cache_config, modules


def allowed(graphs: Graphs, modules: list[torch.nn.Module]) -> set[int]:
    """Addresses of what outlives a replay: weights, the memory of keys and values, and the recordings' buffers."""
    tensors: list[Tensor] = [x for module in modules for x in (*module.parameters(), *module.buffers())]
    for memory in graphs._memories:
        tensors += memory.pools.values()
        for recording in filter(None, memory.recordings.values()):
            tensors += (*recording.inputs, recording.visible, recording.slots)
    return {address(x.value) for x in tensors}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), ("gemma2", 2), ("gpt2", 2), *((kind, 2) for kind in HEADS)])
@torch.inference_mode()
def test_every_padded_size_is_captured_and_replays_what_the_model_computes(kind: str, batch: int) -> None:
    """A replay runs the launches that were recorded, on the memory that they had, after everything that other graphs
    put out is spoilt; a capture raises at a host read, a size that depends on data and a copy of pageable memory.
    """
    with SimulatedDevice() as device:
        run, plain, graphs, config, modules = forwards(kind, recorder := SimRecorder(device))
        beside = SlotCache(config, batch, graphs.slots(TEXT + TOKENS[-1]))
        replayed = 0
        sizes = TOKENS if kind == "llama" else TOKENS[::4]
        for number, size in enumerate(sizes, start=1):
            fewer = size if size - 1 in TOKENS or size == 1 else size - 1  # padded
            cache = graphs.cache(config, batch, TEXT + TOKENS[-1])  # each size in a request of its own
            for visit, count in enumerate((size, size, fewer)):  # the first visit of a shape is not recorded
                positions = torch.arange(TEXT, TEXT + count, device=SIM).repeat(batch, 1)
                visible = torch.arange(TEXT + count, device=SIM) <= positions[..., None]
                tokens = torch.randint(VOCAB, (batch, count), device=SIM)
                for each in (cache, beside):
                    each.set_write_slots(positions, TEXT if batch == 1 else None, TEXT + count)
                device.waits.clear()
                found, expected = run(cache, visible, tokens, positions), plain(beside, visible, tokens, positions)
                assert not device.waits
                torch.testing.assert_close(found.cpu(), expected.cpu(), atol=1e-4, rtol=1e-4)
                replayed += visit > 0
            assert (len(recorder.graphs), recorder.replayed) == (number, replayed)
            assert all(graph.reads <= allowed(graphs, modules) for graph in recorder.graphs)
        assert graphs.refused is None
