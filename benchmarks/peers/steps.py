"""Time a trainer's steps for ``benchmarks.train_step``: one JSON job on standard input, one JSON line out.

A job has ``config`` (of the target's decoder), ``drafted`` tokens, ``inputs`` (number of fused layers), ``unrolled``
steps, their ``decay``, ``device``, ``threads``, and ``batches``: for each its ``ids``, ``mask`` and ``lengths`` of
conversations.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Job = dict[str, Any]
Batch = dict[str, Any]


def time_steps(prepare: Callable[[Job], tuple[list[Batch], Callable[[Batch], Tensor], list[nn.Parameter]]]) -> None:
    """Time a step on every batch of the job, after a first pass over all of them.

    Args:
        prepare: returns, for a job, its batches as tensors, a step that trains on one and returns its loss, and the
            parameters that it trains.
    """
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    batches, step, trained = prepare(job)
    seconds = []
    for batch in [*batches, *batches]:
        start = time.perf_counter()
        loss = step(batch)
        if job["device"] == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    count = sum(parameter.numel() for parameter in trained)
    print(json.dumps({"seconds": seconds[len(batches) :], "trained_parameters": count, "loss": float(loss.detach())}))
