"""What bounds a verifying forward on a CPU: the bytes it reads, the products it computes, or everything else.

Measured in turns, so that all see the same machine:

* how fast memory is read (a sum over a tensor far larger than the caches) and how fast large bf16 products run;
* the target's linear layers alone, packed, one after the other as a forward calls them, over n tokens;
* the whole forward over n tokens behind a context.

The limit of n tokens is the larger of (bytes of the weights / reading speed) and (operations / product speed): no way
to run these layers on this machine takes less. Run it on an idle machine.

    python -m benchmarks.forward_limits --json benchmarks/results/forward-limits.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.recorded import record_main
from fsd_bench.environment import environment
from fsd_infer.cli.report import number, table
from fsd_infer.cpu.ops import packed_products, speed_up
from fsd_infer.cpu.packing import Packed
from fsd_infer.errors import FsdError
from fsd_infer.target import Target
from fsd_infer.tuning.probe import Probe

READ = 2**28  # bytes that are summed
SIDE = 2048  # of the square matrices that are multiplied


def packed_layers(target: Target) -> list[Packed]:
    """The target's packed products. Raises FsdError if there are none."""
    found = packed_products(target.model)
    if not found:
        raise FsdError("nothing is packed: this needs a CPU with bf16 products in oneDNN.")
    return found


def run_layers(layers: Sequence[Packed], inputs: dict[int, Tensor]) -> None:
    """Every product once; inputs [1, n, in] by their width."""
    for layer in layers:
        layer(inputs[layer.weight.shape[1]])


@torch.inference_mode()
def measure(name: str, nodes: Sequence[int], context: int, repeats: int) -> dict[str, Any]:
    """The record but its environment: see the module's description. Raises FsdError."""
    target = Target.from_pretrained(name, dtype=torch.bfloat16, device="cpu")
    speed_up(target.model, release=True)
    layers, probe = packed_layers(target), Probe(target, context, max(nodes))
    sizes = [layer.weight.numel() for layer in layers]
    much, square = torch.ones(READ // 4), torch.randn(SIDE, SIDE, dtype=torch.bfloat16)
    tasks: dict[tuple[str, int], Callable[[], Any]] = {
        ("read", 0): much.sum,
        ("product", 0): partial(torch.mm, square, square),
    }
    for n in nodes:
        inputs = {width: torch.randn(1, n, width).bfloat16() for width in {layer.weight.shape[1] for layer in layers}}
        tasks["linear", n] = partial(run_layers, layers, inputs)
        tasks["forward", n] = partial(probe, n)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in tasks}
    for turn in range(repeats + 1):
        for key, task in tasks.items():
            start = time.perf_counter()
            task()
            if turn:  # first calls allocate
                seconds[key].append(time.perf_counter() - start)
    took = {key: median(values) for key, values in seconds.items()}
    read, product = READ / took["read", 0], 2 * SIDE**3 / took["product", 0]
    rows = [
        {
            "nodes": n,
            "forward_ms": 1e3 * took["forward", n],
            "linear_ms": 1e3 * took["linear", n],
            "reading_ms": 1e3 * 2 * sum(sizes) / read,
            "computing_ms": 1e3 * 2 * n * sum(sizes) / product,
        }
        for n in nodes
    ]
    return {
        "target": name,
        "context": context,
        "repeats": repeats,
        "linear_layers": len(layers),
        "linear_bytes": 2 * sum(sizes),
        "bytes_read_per_second": read,
        "operations_per_second": product,
        "rows": rows,
    }


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record of a command line. Raises FsdError."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return {"environment": environment(command), **measure(args.target, args.nodes, args.context, args.repeats)}


def report(record: dict[str, Any]) -> str:
    """The machine's limits, and a table."""
    gigabytes, teraflops = record["bytes_read_per_second"] / 1e9, record["operations_per_second"] / 1e12
    names = ("nodes", "forward_ms", "linear_ms", "reading_ms", "computing_ms")
    headers = ["nodes", "forward ms", "linear layers", "limit by reading", "by computing"]
    rows = [[number(row[name], 0 if name == "nodes" else 1) for name in names] for row in record["rows"]]
    machine = f"memory is read at {gigabytes:.0f} GB/s, large products run at {teraflops:.2f} TFLOP/s"
    return f"{machine}\n{table(headers, rows)}"


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward_limits", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 4, 8, 16, 32], help="tokens of a forward")
    parser.add_argument("--context", type=int, default=128, help="tokens of text before them (%(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "forward-limits.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print it."""
    return record_main("benchmarks.forward_limits", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
