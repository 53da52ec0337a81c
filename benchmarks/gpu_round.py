"""Milliseconds of a round at a real target's shape, with random weights: where the time of decoding goes on a GPU.

    python -m benchmarks.gpu_round --json benchmarks/results/gpu-round.json

Tokens of random weights mean nothing, so only the time of a round counts, and the acceptance length is shown with it.
Each part runs in a process of its own, and is recorded as soon as it is done. The same command runs the parts that are
missing; ``--again PART`` repeats one. Parts:

=============  =========================================================================================================
limit          bytes that a forward and a draft step read, over the bandwidth of a copy
kernels        attention, top-k and the small launches of a layer alone, over short and long texts
products       each product of few rows, by cuBLAS and by a candidate in Triton (:mod:`.few_rows`)
forwards       the target's forward over 1 to 60 nodes, as one CUDA graph of :class:`.CudaStack`
plain          decoding without a drafter, with graphs, without graphs, and with torch's kernels alone
rounds         `exact` with trees of several shapes, and chosen among recorded ones; draft, target and rule by phase
rules          `tilted`, `fuzzy` and sampling compared with `exact`
lag            `plain` and `exact`, whose reports the host reads a round late, and before it launches the next round
batch          1 to 16 rows
context        600 and 8,000 tokens of context
transformers   its `generate`, eager
static         its `generate` with a static cache, which it compiles
=============  =========================================================================================================
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_place import DRAFTED, NEW, PROMPT, Place
from benchmarks.recorded import ROOT, parser_of, record_main
from fsd_bench.estimate import head_on_paper, planned_head, weights_read
from fsd_core.errors import FsdError
from fsd_core.functional import KERNELS
from fsd_core.tables import table
from fsd_infer import FuzzyDecoder, TreeShape
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters import EagleDrafter, NoDrafter
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.engine.callback import Callback
from fsd_infer.heads.head import EagleConfig, EagleHead

TREES = ((3, 1, 4), (5, 1, 6), (5, 4, 16), (6, 4, 24), (6, 10, 60))
MINUTES = 7.5  # of a part, after which it is killed
Rows = dict[str, dict[str, Any]]


def limit(place: Place) -> Rows:
    megabytes = 4096 if place.device.type == "cuda" else 16
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=place.device)
    copy = torch.empty_like(source)
    bandwidth = 2 * source.numel() / min(place.seconds(lambda: copy.copy_(source)) for _ in range(10))
    target = place.planned
    head = head_on_paper(target, planned_head(target, layout="eagle3", draft_vocab_size=_drafted(place)))
    read = {"forward": 2.0 * weights_read(target), "draft step": head.depth_bytes}
    return {"copy": {"bytes_per_second": bandwidth}} | {
        name: {"bytes": size, "ms": 1e3 * size / bandwidth} for name, size in read.items()
    }


def kernels(place: Place) -> Rows:
    from fsd_infer.backends.cuda import attention, layer
    from fsd_infer.backends.cuda import kernels as rows

    config, results = place.config, Rows()
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    options: dict[str, Any] = {"device": place.device, "dtype": place.dtype}

    def note(name: str, run: Callable[[], Any], **facts: Any) -> None:
        results[name] = {"ms": place.timed(run), **facts}

    for length in (600, 1800, 8000) if place.device.type == "cuda" else (20,):
        keys, values = torch.randn(2, 1, key_heads, length + 64, width, **options)
        lengths = torch.tensor([length], device=place.device)
        for nodes in (1, 16, 60) if place.device.type == "cuda" else (2,):
            query = torch.randn(1, nodes, heads, width, **options)
            visible_after = torch.ones(1, nodes, nodes, dtype=torch.bool, device=place.device).tril()
            note(
                f"attention {nodes} nodes, {length} slots",
                lambda q=query, k=keys, v=values, n=lengths, m=visible_after: attention.tree_attention(
                    q, k, v, n, m, 0.1
                ),
                bytes=2 * keys[:, :, :length].nbytes,
            )
    hidden, inner = config.hidden_size, config.intermediate_size
    x, both = torch.randn(60, hidden, **options), torch.randn(60, 2 * inner, **options)
    note("residual and norm, 60 nodes", lambda: layer.add_norm(x, x, x[0], 1e-5))
    note("SiLU, 60 nodes", lambda: layer.silu_mul(both))
    for count, size in ((1, _drafted(place)), (10, _drafted(place)), (60, config.vocab_size)):
        logits = torch.randn(count, size, **options)
        note(f"top 10 of {count} x {size}", lambda x=logits: rows.topk_logprobs(x, 10), bytes=logits.nbytes)
    return results


@torch.inference_mode()
def products(place: Place) -> Rows:
    """Milliseconds of a product, of several weights in a row, so that none is still in the L2 cache."""
    from benchmarks.few_rows import TILES, product

    config, results = place.config, Rows()
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    both = (heads + 2 * config.num_key_value_heads) * width
    shapes = {
        "qkv": (both, hidden), "o": (hidden, heads * width), "gate and up": (2 * inner, hidden),
        "down": (hidden, inner), "LM head": (config.vocab_size, hidden), "draft's LM head": (_drafted(place), hidden),
        "draft's qkv": (both, 2 * hidden), "draft's fc": (hidden, 3 * hidden),
    }  # fmt: skip
    options: dict[str, Any] = {"device": place.device, "dtype": place.dtype}
    for name, shape in shapes.items():
        count = max(2, (1 << 28) // (2 * shape[0] * shape[1])) if place.device.type == "cuda" else 2
        weights = [torch.randn(shape, **options) for _ in range(count)]
        for rows in (1, 6, 16, 60) if place.device.type == "cuda" else (2,):
            x = torch.randn(rows, shape[1], **options)
            kinds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cuBLAS": torch.nn.functional.linear}
            for tile in TILES if rows <= 16 else ():
                if shape[1] % tile.depth == 0:
                    kinds["Triton " + ",".join(map(str, tile))] = lambda x, weight, tile=tile: product(x, weight, tile)
            for kind, run in kinds.items():
                ms = place.timed(lambda run=run, x=x, all=weights: [run(x, weight) for weight in all]) / count
                results[f"{name}, {rows} rows, {kind}"] = {"ms": ms, "bytes": weights[0].nbytes}
    return results


@torch.inference_mode()
def forwards(place: Place) -> Rows:
    decoder = FuzzyDecoder.from_pretrained(place.model(), NoDrafter(place.config.vocab_size), weights="packed")
    target, results = decoder.target, Rows()
    cache = SlotCache(target.cache_config, 1, place.prompt + 160)
    lengths = torch.tensor([place.prompt + 88], device=place.device)
    for nodes in (1, 6, 16, 60):
        tokens = torch.zeros(1, nodes, dtype=torch.long, device=place.device)
        visible_after = torch.ones(1, nodes, nodes, dtype=torch.bool, device=place.device).tril()
        slots = lengths[:, None] + torch.arange(nodes, device=place.device)
        visible = torch.arange(cache.capacity, device=place.device) <= slots[..., None]
        cache.set_write_slots(slots, None, cache.capacity)
        cache.text = lengths, visible_after

        def run(tokens: Tensor = tokens, slots: Tensor = slots, visible: Tensor = visible) -> Any:
            return target.forward(tokens, slots, visible, cache)

        results[f"{nodes} nodes"] = {"ms": place.timed(run), "stack": type(target.stack).__name__}
    return results


def decoded(place: Place, decoder: FuzzyDecoder, rule: str = "exact", batch: int = 1, **options: Any) -> dict[str, Any]:
    """Decode random prompts four times and return the last three's milliseconds per round."""
    torch.manual_seed(0)
    prompts = torch.randint(5, place.config.vocab_size, (batch, place.prompt)).tolist()
    options = {"do_sample": False, "max_new_tokens": place.new, **options}
    first = place.seconds(lambda: decoder.generate(prompts, rule=rule, **options))
    times, phases = [], {}
    for _ in range(3):
        stats = decoder.generate(prompts, rule=rule, **options).stats
        rounds = max(row.target_forwards for row in stats.rows) - 1
        times.append(1e3 * (stats.seconds - stats.prefill_seconds) / rounds)
        phases = {name: 1e3 * spent / rounds for name, spent in stats.phases.items()}
    return {
        "ms": median(times), "tau": stats.acceptance_length, "phases_ms": phases,
        "prefill_ms": 1e3 * stats.prefill_seconds,
        "first_s": first, "refused": getattr(decoder.target.recorded, "refused", None),
    }  # fmt: skip


def loaded(place: Place, tree: tuple[int, int, int] | None = None, graphs: bool | None = None) -> FuzzyDecoder:
    """A decoder of the random target, with a random EAGLE-3 head where there is a tree."""
    vocabulary = place.config.vocab_size
    decoder = FuzzyDecoder.from_pretrained(place.model(), NoDrafter(vocabulary), weights="packed", recording=graphs)
    if tree is not None:
        decoder.drafter = decoder.load_drafter(drafter_of(place, decoder, tree))
    return decoder


def drafter_of(place: Place, decoder: FuzzyDecoder, tree: tuple[int, int, int]) -> EagleDrafter:
    torch.manual_seed(1)
    count = int(place.config.num_hidden_layers)
    layers = sorted({min(2, count - 1), count // 2, max(0, count - 3)})
    options = {"layout": "eagle3", "draft_vocab_size": _drafted(place), "fused_layers": layers}
    return EagleDrafter(EagleHead(EagleConfig.for_target(decoder.target, **options)), decoder.target, TreeShape(*tree))


def _drafted(place: Place) -> int:
    return min(DRAFTED, int(place.config.vocab_size) // 2)


def plain(place: Place) -> Rows:
    results = {"as it is": decoded(place, loaded(place))}
    if place.device.type == "cuda":
        results["without graphs"] = decoded(place, loaded(place, graphs=False))
        os.environ["FSD_KERNELS"] = "0"
        from fsd_infer.backends.cuda.backend import uses_triton

        uses_triton.cache_clear()
        for implementations in KERNELS.values():
            implementations.pop("cuda", None)
        results["torch's kernels, graphs"] = decoded(place, loaded(place))
    return results


def rounds(place: Place) -> Rows:
    decoder, results = loaded(place), Rows()
    for tree in TREES:
        decoder.drafter = decoder.load_drafter(drafter_of(place, decoder, tree))
        results[",".join(map(str, tree))] = decoded(place, decoder)
    decoder.drafter = choose_trees(decoder.load_drafter(drafter_of(place, decoder, TREES[-1])), decoder.target)
    results["auto, of drafts that are wrong"] = decoded(place, decoder)
    return results


def rules(place: Place) -> Rows:
    decoder = loaded(place, TREES[-1])
    results = {rule: decoded(place, decoder, rule) for rule in ("exact", "tilted", "fuzzy:js:0.3")}
    for rule in ("exact", "tilted"):
        results[f"{rule}, sampled"] = decoded(place, decoder, rule, do_sample=True, temperature=0.8, seed=0)
    return results


class AtOnce(Callback):
    """Lets the host read each round before it launches the next one."""

    reads_tensors, waits = False, True


def lag(place: Place) -> Rows:
    decoder, results = loaded(place), Rows()
    for name in ("plain", "exact"):
        if name == "exact":
            decoder.drafter = decoder.load_drafter(drafter_of(place, decoder, TREES[-1]))
        results[f"{name}, a round late"] = decoded(place, decoder)
        results[f"{name}, at once"] = decoded(place, decoder, callbacks=[AtOnce()])
    return results


def batch(place: Place) -> Rows:
    results, decoder = Rows(), loaded(place)
    sizes = (1, 4, 8, 16) if place.device.type == "cuda" else (2,)
    results |= {f"plain, {rows} rows": decoded(place, decoder, batch=rows) for rows in sizes}
    decoder.drafter = decoder.load_drafter(drafter_of(place, decoder, TREES[-1]))
    return results | {f"exact, {rows} rows": decoded(place, decoder, batch=rows) for rows in sizes}


def context(place: Place) -> Rows:
    results = Rows()
    for length in (600, 8000) if place.device.type == "cuda" else (20,):
        place.prompt = length
        results[f"plain, {length} tokens"] = decoded(place, loaded(place))
        results[f"exact, {length} tokens"] = decoded(place, loaded(place, TREES[-1]))
    return results


def generated(place: Place, **options: Any) -> dict[str, Any]:
    """Milliseconds of a token of transformers' ``generate``, the prompt's forward left out."""
    model, few = place.model(), max(2, place.new // 12)
    ids = torch.randint(5, place.config.vocab_size, (1, place.prompt), device=place.device)

    def run(count: int) -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                       do_sample=False, pad_token_id=0, **options)  # fmt: skip

    first = place.seconds(lambda: (run(place.new), run(few)))
    seconds = [place.seconds(lambda: run(place.new)) - place.seconds(lambda: run(few)) for _ in range(3)]
    return {"ms": 1e3 * median(seconds) / (place.new - few), "first_s": first}


def transformers(place: Place) -> Rows:
    return {"generate": generated(place)}


def static(place: Place) -> Rows:
    return {"generate, static cache": generated(place, cache_implementation="static")}


PARTS: dict[str, Callable[[Place], Rows]] = {
    part.__name__: part
    for part in (limit, kernels, products, forwards, plain, rounds, rules, lag, batch, context, transformers, static)
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the missing parts, each in a process that writes to ``--json`` or prints."""
    parts = [name for name in args.parts.split(",") if name]
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise FsdError(f"{unknown[0]} is not one of the parts {', '.join(PARTS)}.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise FsdError("this machine has no CUDA device: --device cpu --shape DIRECTORY runs a toy.")
    stored = json.loads(args.json.read_text(encoding="utf-8")) if args.json is not None and args.json.is_file() else {}
    parts_done: dict[str, Any] = stored.get("parts", {})
    for name in parts:
        if name in parts_done and "error" not in parts_done[name] and name != args.again:
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        parts_done[name] = _in_process(name, args)
        if args.json is not None:  # what is done stays done
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({**stored, "parts": parts_done}, indent=1), encoding="utf-8")
    return {"parts": {name: parts_done[name] for name in PARTS if name in parts_done}}


def _in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    if name in ("kernels", "products") and importlib.util.find_spec("triton") is None:
        return {"error": "Triton is not installed"}
    words = [sys.executable, "-m", "benchmarks.gpu_round", "--part", name, "--shape", args.shape]
    words += ["--device", args.device, "--prompt", str(args.prompt), "--new", str(args.new)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environ |= {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {MINUTES:g} minutes"}
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][-300:]}
    rows: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"rows": rows, "seconds": round(time.perf_counter() - start, 1)}


def report(record: dict[str, Any]) -> str:
    """Return a table of all rows, each with the limit of a forward."""
    lines = []
    least = record["parts"].get("limit", {}).get("rows", {}).get("forward", {}).get("ms")
    for name, part in record["parts"].items():
        for row, facts in part.get("rows", {"error": {"error": part.get("error", "")}}).items():
            ms, phases = facts.get("ms"), facts.get("phases_ms", {})
            spent = ", ".join(f"{phase} {value:.2f}" for phase, value in phases.items())
            shown = facts.get("error") or "" if ms is None else f"{ms:.3f}"
            lines.append([name, row, shown, f"{ms / least:.2f}" if ms and least else "", spent])
    return table(["part", "what", "ms", "of the limit", "ms by phase"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; with ``--part``, one part in this process. Return 1 if a part failed."""
    parser = parser_of(
        "benchmarks.gpu_round", __doc__, shape=("llama-3.1-8b", "name of a shape, or a directory with a config.json"),
        device=("cuda", "cuda, or cpu for a toy"), parts=(",".join(PARTS), "which, separated by commas"),
        again=(None, "a part to repeat"), part=(None, "run this part here and print its rows as JSON"),
        prompt=(PROMPT, "tokens of a prompt"), new=(NEW, "tokens of an answer"), json=None,
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.part is None:
        failed: list[str] = []

        def measured(args: argparse.Namespace) -> dict[str, Any]:
            record = measure(args)
            failed.extend(name for name, part in record["parts"].items() if "error" in part)
            return record

        return record_main("benchmarks.gpu_round", parser, measured, report, argv) or int(bool(failed))
    print(json.dumps(PARTS[args.part](Place(args.shape, args.device, args.prompt, args.new))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
