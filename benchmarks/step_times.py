"""Times of training steps, and of the products that they consist of, for ``benchmarks.real_sizes``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback


class StepTimes(Callback):
    """Writes the processor and wall seconds of each step but a run's first to a file."""

    def __init__(self, path: str) -> None:
        self.path, self.ends = path, [(time.process_time(), time.perf_counter())]

    def on_train_batch_end(self, *args: Any, **options: Any) -> None:
        self.ends.append((time.process_time(), time.perf_counter()))
        pairs = zip(self.ends[1:], self.ends[2:], strict=False)
        steps = [[end - begin for begin, end in zip(*pair, strict=True)] for pair in pairs]
        Path(self.path).write_text(json.dumps(steps), encoding="utf-8")


def product_rate() -> float:
    """Return the bf16 operations per processor second in products of the sizes that training has."""
    x, weight = torch.randn(2048, 1024).bfloat16(), torch.randn(8192, 1024).bfloat16()
    torch.nn.functional.linear(x, weight)
    start = time.process_time()
    for _ in range(5):
        torch.nn.functional.linear(x, weight)
    return 5 * 2 * x.numel() * len(weight) / (time.process_time() - start)
