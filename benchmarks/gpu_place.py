"""A target of random weights on a device, for measurements of rounds and of training steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fsd_bench.planned import planned_target

PROMPT, NEW, DRAFTED = 512, 96, 32000  # tokens of a prompt and an answer; ids of the head's vocabulary


class Place:
    """A target of random weights on a device, and the clock of that device.

    Args:
        shape: as :func:`.planned_target` takes it.
        device: on which it is made.
        new: tokens of an answer.
        prompt: tokens of a prompt.
        changes: sizes to change, as :func:`.planned_target` takes them.
    """

    def __init__(
        self,
        shape: str,
        device: str,
        prompt: int = PROMPT,
        new: int = NEW,
        changes: Mapping[str, int] | None = None,
    ) -> None:
        self.device, self.prompt, self.new = torch.device(device), prompt, new
        self.planned = planned_target(shape, changes)
        self.config = self.planned.config
        self.config.eos_token_id = None
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=self.dtype).eval()
        model.generation_config.eos_token_id = None
        return model

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any]) -> float:
        self.sync()
        start = time.perf_counter()
        run()
        self.sync()
        return time.perf_counter() - start

    def timed(self, run: Callable[[], Any]) -> float:
        """Milliseconds of one of many runs in a row, recorded as a graph where that is possible."""
        repeats = 30 if self.device.type == "cuda" else 1
        run()
        if self.device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            run = graph.replay
        run()
        return 1e3 * self.seconds(lambda: [run() for _ in range(repeats)]) / repeats
