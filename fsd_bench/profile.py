"""What one method takes beside time: memory by part, and seconds of a target forward by number of tree nodes.

``python -m fsd_bench.profile RECORD.json`` adds ``profile`` to a finished record. It is a process of its own,
because a process that other methods ran in has their memory too::

    {"method": "exact", "device": "cpu",
     "memory": {"libraries": …, "weights": …, "packed_weights": …, "caches": …, "peak_loading": …, "peak": …,
                "above_weights_and_caches": 0.08, …},
     "forward_seconds": {"1": 0.0098, "16": 0.0121, …}}

Bytes are resident ones of the process (on CUDA: of the device's allocator, and there are no libraries in it).
``libraries`` is what the process holds after a toy model has given an answer, before a model is loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from fsd_bench.engine import EngineMethod
from fsd_bench.methods import make_methods, parse_methods
from fsd_bench.models import ModelOptions, Models
from fsd_bench.probe import Probe
from fsd_bench.record import write_record
from fsd_infer.cpu.ops import packed_products, speed_up
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.device.cache import SlotCache
from fsd_infer.drafters import LookupDrafter
from fsd_infer.errors import DataError, FsdError
from fsd_infer.rules import RULES
from fsd_infer.targets.target import Target

NODES = (1, 2, 4, 8, 12, 16, 24, 32)
CONTEXT = 128  # tokens that the measured forwards attend to
ROUNDS = 30  # measurements of each number of nodes


def profile_method(text: str, settings: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
    """Load what one method of this package needs, and measure it. Call it in a fresh process.

    Args:
        text: the method, e.g. ``"exact"`` or ``"mine=exact@heads/mine"``.
        settings: ``target``, ``drafter``, ``dtype``, ``device``, ``tree``, ``threads`` and ``max_new_tokens`` of a
            record.
        prompt_tokens: length of the prompt that is decoded for the peak; its tokens are arbitrary.

    Returns:
        What the module's description shows.

    Raises:
        FsdError: not a method of this package, and whatever loading raises.
    """
    spec = parse_methods([text])[0]
    if spec.kind != "plain" and spec.kind not in RULES:
        raise FsdError(f"method {text!r}: only methods of this package can be profiled, e.g. exact.")
    if settings.get("threads"):
        torch.set_num_threads(settings["threads"])
    device = torch.device(settings.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
    meter = Meter(device)
    method = make_methods([text], Models(ModelOptions.from_dict(settings)))[0]
    assert isinstance(method, EngineMethod)
    memory = meter.measure(method, prompt_tokens, int(settings["max_new_tokens"]))
    return {
        "method": spec.name,
        "device": str(device),
        "memory": memory,
        "forward_seconds": {str(nodes): s for nodes, s in forward_seconds(method.decoder.target).items()},
    }


class Meter:
    """Memory of this process, or of a CUDA device. Make it before any model is loaded.

    Args:
        device: where models will be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        _use_libraries(device)
        self.libraries = 0 if device.type == "cuda" else resident_bytes()

    def measure(self, method: EngineMethod, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """Bytes by part, and the peak while one answer is decoded.

        ``weights`` counts every parameter and buffer of target and drafter once, also those that are held in the layout
        of the CPU's library alone, and those that became fp8 as such; ``packed_weights`` is what lies in that layout.
        ``above_weights_and_caches`` is (peak - libraries) / (weights + caches) - 1, with what is held in both layouts
        among what is above.
        ``peak_loading`` is the peak until the models were loaded; None where the system cannot tell it from the later
        one.
        """
        decoder = method.decoder
        modules = [decoder.target.model, *method.drafter.modules()]
        weights = tensor_bytes(tensor for module in modules for tensor in [*module.parameters(), *module.buffers()])
        products = [product for module in modules for product in packed_products(module)]
        weights -= sum(product.saved_bytes for product in products)
        packed = sum(_bytes(product.weight) for product in products)
        gc.collect()
        loaded, loading = self._resident(), self._peak()
        separate = self._restart_peak()
        caches = _Caches()
        limit = decoder.target.max_positions or sys.maxsize
        prompt = [(7 * i + 11) % decoder.target.vocab_size for i in range(min(prompt_tokens, limit - new_tokens - 1))]
        decoder.generate(
            [prompt], method.rule, drafter=method.drafter, streamer=caches, max_new_tokens=new_tokens,
            do_sample=False, temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        peak = self._peak()
        return {
            "unit": "bytes",
            "libraries": self.libraries,
            "weights": weights,
            "packed_weights": packed,
            "caches": caches.bytes,
            "loaded": loaded,
            "peak_loading": loading if separate else None,
            "peak": peak,
            "prompt_tokens": len(prompt),
            "above_weights_and_caches": (peak - self.libraries) / (weights + caches.bytes) - 1,
        }

    def _resident(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else resident_bytes()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_bytes()

    def _restart_peak(self) -> bool:
        """Forget the peak so far; False where the system keeps it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        return restart_peak()


class _Caches(BaseStreamer):
    """Counts the bytes of key-value caches while an answer is being decoded."""

    def __init__(self) -> None:
        self.bytes = 0

    def put(self, value: Tensor) -> None:
        if not self.bytes:
            found = [o for o in gc.get_objects() if type(o) is SlotCache]
            self.bytes = tensor_bytes(pool for cache in found for pool in cache._pools.values())

    def end(self) -> None:
        pass


def resident_bytes() -> int:
    """Memory of this process that is in use now; where the system does not tell, its peak."""
    found = _status("VmRSS")
    return peak_bytes() if found is None else found


def peak_bytes() -> int:
    """The most memory this process has used, since the peak was last forgotten where the system can forget it."""
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def restart_peak() -> bool:
    """Make :func:`peak_bytes` count from now on; False where the system keeps the peak of the whole run."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(key: str) -> int | None:
    """A line of Linux's /proc/self/status, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those that share their memory counted once and those on "meta" as if they had it."""
    return sum({tensor.data_ptr() or id(tensor): _bytes(tensor) for tensor in tensors}.values())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@torch.inference_mode()
def _use_libraries(device: torch.device) -> None:
    """Make the libraries take what they take once, their code included, by a toy's answer: it belongs to no model."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config)
    target = Target(model.to(device, torch.bfloat16).eval())
    speed_up(target.model, release=True)
    decoder = FuzzyDecoder(target, LookupDrafter(target.vocab_size))
    decoder.generate([[5, 6, 7, 5, 6]], "exact", max_new_tokens=8, do_sample=False)


@torch.inference_mode()
def forward_seconds(target: Target, nodes: Sequence[int] = NODES, rounds: int = ROUNDS) -> dict[int, float]:
    """Median wall seconds of one target forward by number of new nodes after a context, measured in turns.

    Args:
        target: as it decodes.
        nodes: numbers of nodes; those for which the context has no room are left out.
        rounds: measurements of each.
    """
    limit = (target.max_positions or 4 * max(nodes) + CONTEXT) - 1
    counts = [n for n in nodes if 2 * n < limit]
    probe = Probe(target, min(CONTEXT, limit - max(counts)), max(counts))

    def forward(nodes: int) -> None:
        probe(nodes)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)

    for n in counts:  # first calls allocate
        forward(n)
    seconds: dict[int, list[float]] = {n: [] for n in counts}
    for _ in range(rounds):
        for n in counts:
            start = time.perf_counter()
            forward(n)
            seconds[n].append(time.perf_counter() - start)
    return {n: statistics.median(values) for n, values in seconds.items()}


def default_method(record: dict[str, Any]) -> str:
    """The fastest method of a record that drafts under the exact rule, as text; without one, ``"plain"``."""
    drafting = [
        name
        for name, facts in record["methods"].items()
        if facts["by"] == "fsd_infer" and facts["rule"]["rule"] == "exact" and facts["drafter"]["name"] != "none"
    ]
    best = max(drafting, key=lambda name: record["methods"][name]["tokens_per_second"] or 0.0, default=None)
    texts: list[str] = record["settings"]["methods"]  # others are of engines that are unknown here
    return next((text for text in texts if best in (text, text.partition("=")[0])), "plain")


def main(argv: Sequence[str] | None = None) -> int:
    """Add ``profile`` to a record. Run it where the record was made, so that its paths mean the same."""
    parser = argparse.ArgumentParser(prog="python -m fsd_bench.profile", description=__doc__.split("\n\n")[0])
    parser.add_argument("record", type=Path, help="written by `fsd-infer bench --json`")
    parser.add_argument("--method", help="as in --methods (default: the record's fastest exact one)")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        try:
            record = json.loads(args.record.read_text(encoding="utf-8"))
            longest = max(row["prompt_tokens"] for row in record["prompts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{args.record} is not a record of fsd-infer bench ({error}).") from error
        found = profile_method(args.method or default_method(record), record["settings"], longest)
    except FsdError as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2
    record["profile"] = found
    write_record(args.record, record)
    above = found["memory"]["above_weights_and_caches"]
    print(
        f"profile of {found['method']}: peak {100 * above:.0f} % above weights and caches "
        f"({time.perf_counter() - start:.0f} s)",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
