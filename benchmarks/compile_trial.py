"""Is ``torch.compile`` faster than fused eager modules for a target's verifying forward on a CPU?

Every variant runs the same forward, of n tree nodes behind a context, on the same weights in bf16, with static shapes:

* ``eager``: transformers' modules as they are;
* ``fused``: what the engine runs (:mod:`fsd_infer.cpu.ops`, :mod:`fsd_infer.cpu.packing`);
* ``compiled``: ``torch.compile`` of ``eager`` with freezing, which packs the linear layers' weights;
* ``compiled+cpp_wrapper``, ``compiled+max_autotune``: the same with these options of inductor.

Calls are interleaved, one of each variant in turn. What counts is the process's CPU time divided by the number of
threads, which other work on the machine disturbs least; wall times are recorded beside it. On two threads a variant
that leaves one of them idle looks better in CPU time than on the clock. Compiling needs a C++ compiler and, cold, a
minute or two per variant and size.

    OMP_NUM_THREADS=1 python -m benchmarks.compile_trial --json benchmarks/results/compile-trial.json
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
from torch._inductor import config as inductor_config
from transformers import StaticCache

from fsd_infer.bench.environment import environment
from fsd_infer.cpu.ops import speed_up
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json
from fsd_infer.target import Target
from fsd_infer.tuning.probe import Probe

Forward = Callable[[], Tensor]  # logits [1, n, V]

INDUCTOR: dict[str, dict[str, Any]] = {
    "compiled": {},
    "compiled+cpp_wrapper": {"cpp_wrapper": True},
    "compiled+max_autotune": {"max_autotune": True},
}
VARIANTS = ("eager", "fused", *INDUCTOR)


def fused_forward(target: Target, context: int, nodes: int) -> Forward:
    """The engine's own forward, behind a text of ``context`` tokens."""
    probe = Probe(target, context, nodes)
    return partial(probe, nodes, probe.visible(nodes))  # the mask is made before, as for the others


def static_forward(model: Any, context: int, nodes: int, options: dict[str, Any] | None) -> Forward:
    """transformers' own modules over a static cache; compiled with these options of inductor unless None."""
    slots = torch.arange(context + nodes)[None]
    tokens, own = slots % model.config.vocab_size, slots[:, context:]
    cache = StaticCache(config=model.config, max_cache_len=context + nodes)
    causal = torch.ones(context + nodes, context + nodes, dtype=torch.bool).tril()
    arguments = dict(past_key_values=cache, use_cache=True)
    model(input_ids=tokens[:, :context], attention_mask=causal[None, None, :context], **arguments)
    mask = causal[None, None, context:]

    def run() -> Tensor:
        logits: Tensor = model(input_ids=tokens[:, context:], position_ids=own, attention_mask=mask, **arguments).logits
        return logits

    made = run if options is None else torch.compile(run, dynamic=False, fullgraph=True)

    def forward() -> Tensor:
        layer: Any
        for layer in cache.layers:  # the same slots again in every call
            layer.cumulative_length.fill_(context)
        return made()

    if options is not None:
        # the first call compiles; `torch.compile(options=...)` comes too late for freezing, which tracing looks at
        with inductor_config.patch({"freezing": True, **options}):
            forward()
    return forward


def measure(forwards: dict[tuple[str, int], Forward], repeats: int) -> dict[tuple[str, int], dict[str, float]]:
    """Milliseconds per call, interleaved: medians and quartiles of CPU time per thread, medians of wall time."""
    threads = torch.get_num_threads()
    cpu: dict[tuple[str, int], list[float]] = {key: [] for key in forwards}
    wall: dict[tuple[str, int], list[float]] = {key: [] for key in forwards}
    for _ in range(repeats):
        for key, forward in forwards.items():
            clock, start = time.perf_counter(), time.process_time()
            forward()
            cpu[key].append(1e3 * (time.process_time() - start) / threads)
            wall[key].append(1e3 * (time.perf_counter() - clock))
    quartile = repeats // 4
    return {
        key: {
            "cpu_ms": median(values),
            "cpu_ms_low": sorted(values)[quartile],
            "cpu_ms_high": sorted(values)[-1 - quartile],
            "wall_ms": median(wall[key]),
        }
        for key, values in cpu.items()
    }


@torch.inference_mode()
def trial(name: str, variants: Sequence[str], nodes: Sequence[int], context: int, repeats: int) -> dict[str, Any]:
    """The record: per variant and size its times, seconds until the first logits, their difference from eager's."""
    plain = Target.from_pretrained(name, dtype=torch.bfloat16, device="cpu")
    fused = Target.from_pretrained(name, dtype=torch.bfloat16, device="cpu")
    speed_up(fused.model)
    forwards: dict[tuple[str, int], Forward] = {}
    first: dict[tuple[str, int], float] = {}
    off: dict[tuple[str, int], float] = {}
    for n in nodes:
        expected = static_forward(plain.model, context, n, None)().float()
        for variant in variants:
            start = time.perf_counter()
            if variant == "fused":
                forward = fused_forward(fused, context, n)
            else:
                forward = static_forward(plain.model, context, n, INDUCTOR.get(variant))
            logits = forward().float()
            first[variant, n] = time.perf_counter() - start
            off[variant, n] = float((logits - expected).norm() / expected.norm())
            print(f"{variant}, {n} nodes: first call {first[variant, n]:.1f} s", flush=True)
            for _ in range(3):
                forward()
            forwards[variant, n] = forward
    times = measure(forwards, repeats)
    rows = [
        {"variant": v, "nodes": n, **times[v, n], "first_call_seconds": first[v, n], "relative_difference": off[v, n]}
        for v, n in forwards
    ]
    return {"target": name, "dtype": "bfloat16", "context": context, "repeats": repeats, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16], help="sizes of the tree")
    parser.add_argument("--context", type=int, default=128, help="tokens of text before it")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, help="where the record goes")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        record = trial(options.target, options.variants, options.nodes, options.context, options.repeats)
    except FsdError as error:
        print(f"compile_trial: {error}", file=sys.stderr)
        return 2
    record["environment"] = environment(["python", "-m", "benchmarks.compile_trial", *words])
    for row in record["rows"]:
        print(f"{row['variant']:24} {row['nodes']:3} nodes  {row['cpu_ms']:7.2f} ms CPU  {row['wall_ms']:7.2f} ms wall")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, record, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
