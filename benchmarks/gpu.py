"""What decoding reaches of a device's memory bandwidth, what a round costs beside its models, what drafts would gain.

No weights are fetched: the target is made at random in the shape of a config (Llama-3.1-8B's by default), and its
forward takes as long as that of any weights of that shape. Its layers write next to nothing and its LM head says the
token that follows the last one in the vocabulary, so its answer to anything is known. The drafter runs a random head of
the target's shape, throws its tree away and proposes one of as many nodes, in which each depth of one path is that
answer with the chance that is asked for: tok/s of a head that good, whichever it may be.

* share of bandwidth: bytes of weights that a token reads x tok/s after the prefill / bytes per second of a device copy
  (read and write counted);
* overhead: the share of a round that neither target nor drafter takes when they are waited for one by one (the phases
  in the tables are those of the host, which on a GPU waits for both models where it reads the verdict, in ``rule``);
* methods: transformers' generate, the plain loop, and exact at each chance, in turns.

    python -m benchmarks.gpu --chance 0.6 0.7 0.8 --json benchmarks/results/gpu.json
    python -m benchmarks.gpu --chance 0.6 0.7 0.8 --cuda-graphs --json benchmarks/results/gpu-graphs.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.recorded import record_main, settings_of
from fsd_bench.base import Method
from fsd_bench.engine import EngineMethod
from fsd_bench.environment import environment
from fsd_bench.hf import GenerateMethod
from fsd_bench.planned import SHAPES, read_changes
from fsd_bench.profile import tensor_bytes
from fsd_bench.record import BenchPrompt, build_record
from fsd_bench.report import bench_table
from fsd_bench.schedule import take_turns
from fsd_bench.settings import Settings
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.device.transfer import to_device
from fsd_infer.drafters import DraftRequest, DraftSession, EagleDrafter, NoDrafter
from fsd_infer.drafters.shape import parse_tree
from fsd_infer.drafters.wrapped import WrappedDrafter, WrappedSession
from fsd_infer.errors import FsdError
from fsd_infer.heads.head import EagleConfig, EagleHead
from fsd_infer.rules import Exact
from fsd_infer.targets.loading import attention_for, parse_device, parse_dtype
from fsd_infer.targets.target import Target
from fsd_infer.tree import DraftTree, ancestors_of

COPIES = 20
QUIET = 0.01  # what the layers' outputs are multiplied by, so that they leave the embedding as it is


def shape_of(config: str | None, changes: Sequence[str]) -> Any:
    """The config to make a target of, "KEY=NUMBER" changed in it. Raises FsdError for a change that is none."""
    sizes = {**SHAPES["llama-3.1-8b"], **read_changes(changes)}
    return AutoConfig.from_pretrained(config, **read_changes(changes)) if config else AutoConfig.for_model(**sizes)


def counting_target(config: Any, dtype: torch.dtype, device: torch.device) -> Target:
    """A random target whose likeliest token after token t is t + 1, the first one after the last."""
    config.tie_word_embeddings = False
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_for(config))
    model.generation_config.eos_token_id = None  # every answer is as long as it may be
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= QUIET
    embedding = model.get_input_embeddings().weight.data.normal_()
    model.get_output_embeddings().weight.data.copy_(embedding.roll(1, 0))
    return Target(model, name=f"random {config.model_type}")


class SimulatedDrafter(WrappedDrafter):
    """A head's cost, and a path of drafts of which each is right with some chance if those before it are.

    Args:
        head: what is run; its tree says how many nodes are drafted and how deep.
        chance: of a draft on the path.
    """

    def __init__(self, head: EagleDrafter, chance: float) -> None:
        super().__init__(head)
        self.name, self.head, self.chance, self.clock = "simulated", head, chance, ModelClock(None)
        depth, nodes = min(head.shape.depth, head.max_nodes - 1), torch.arange(head.max_nodes)
        # the path is node 1 to `depth`; all others are leaves beside its nodes
        self.parents = torch.where(nodes <= depth, nodes - 1, nodes % depth).clamp_min(0)[None]
        self.depths = torch.where(nodes <= depth, nodes, nodes % depth + 1)[None]
        self.scores = self.depths * math.log(max(chance, 0.01)) - 3.0 * (nodes > depth)
        self.forget()

    @property
    def max_depth(self) -> int:
        return int(self.depths.max())

    def forget(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def start(self, first_tokens: Tensor, request: DraftRequest) -> DraftSession:
        return _SimulatedSession(self, self.head.start(first_tokens, request))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "chance": self.chance, "head": self.head.describe()}


class _SimulatedSession(WrappedSession):
    def __init__(self, drafter: SimulatedDrafter, session: DraftSession) -> None:
        super().__init__(session)
        self.drafter, self.started = drafter, False

    def extend(self, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        self.drafter.clock(self.session.extend, tokens, features, counts)

    def draft(self, roots: Tensor) -> DraftTree:
        drafter, device = self.drafter, self.drafter.head.target.device
        if not self.started:
            drafter.clock.seconds, self.started = 0.0, True  # what came before was the prefill
        drafter.clock(self.session.draft, roots)
        vocabulary, parents = drafter.head.target.vocab_size, drafter.parents.expand(len(roots), -1)
        on_path = drafter.depths == torch.arange(drafter.max_nodes)
        right = on_path & (torch.rand(parents.shape, generator=drafter.generator) < drafter.chance)
        right[:, 0] = True
        wrong_by = torch.arange(drafter.max_nodes).masked_fill(right, 0)  # different for siblings
        return DraftTree(
            tokens=to_device((roots[:, None] + drafter.depths + wrong_by) % vocabulary, device),
            parents=to_device(parents, device),
            depths=to_device(drafter.depths.expand_as(parents), device),
            ancestors=to_device(ancestors_of(parents), device),
            q_logits=torch.empty(len(roots), 0, vocabulary, device=device),
            q_index=to_device(torch.full_like(parents, -1), device),
            scores=to_device(drafter.scores.expand_as(parents), device),
        )


class ModelClock:
    """Adds up the seconds of calls, each waited for on the device; off (None): it only calls."""

    def __init__(self, device: torch.device | None) -> None:
        self.device, self.seconds = device, 0.0

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.device is None:
            return function(*args, **options)
        _wait(self.device)
        start = time.perf_counter()
        made = function(*args, **options)
        _wait(self.device)
        self.seconds += time.perf_counter() - start
        return made


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_seconds_per_round(method: EngineMethod, drafter: SimulatedDrafter, prompt: list[int], new: int) -> float:
    """Of target and drafter after the prefill, while one more answer is decoded."""
    target, forward = method.decoder.target, method.decoder.target.forward
    drafter.clock = ModelClock(target.device)
    target.forward = lambda *args, **options: drafter.clock(forward, *args, **options)  # type: ignore[method-assign]
    try:
        made = method.answer([prompt], {"max_new_tokens": new, "do_sample": False}, 0).answers[0]
        return drafter.clock.seconds / max(made.target_forwards or 0, 1)
    finally:
        del target.forward  # the instance's: the class's own is back
        drafter.clock = ModelClock(None)


def copy_speed(device: torch.device, size: int) -> float:
    """Bytes that a device copy reads and writes per second, the median of some."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into, clock, seconds = torch.empty_like(source), ModelClock(device), []
    for _ in range(COPIES + 1):
        clock.seconds = 0.0
        clock(into.copy_, source)
        seconds.append(clock.seconds)
    return 2 * size / statistics.median(seconds[1:])  # the first call allocates


def measure(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record: see the module's description. Raises FsdError."""
    if not all(0 <= chance <= 1 for chance in args.chance):
        raise FsdError(f"--chance takes probabilities, from 0 to 1; got {args.chance}.")
    device = parse_device(args.device)
    config = shape_of(args.config, args.set)
    torch.manual_seed(0)
    target = counting_target(config, parse_dtype(args.dtype), device)
    options = {"draft_vocab_size": min(args.draft_vocab, target.vocab_size)}
    head = EagleDrafter(EagleHead(EagleConfig.for_target(target, **options)), target, parse_tree(args.tree))
    decoder = FuzzyDecoder(target, head)
    if args.cuda_graphs:
        decoder.use_graphs()
    drafters = {f"exact {chance:g}": SimulatedDrafter(head, chance) for chance in args.chance}
    drafting = {name: EngineMethod(name, decoder, Exact(), drafter) for name, drafter in drafters.items()}
    plain = EngineMethod("plain", decoder, Exact(), NoDrafter(target.vocab_size))
    methods: list[Method] = [GenerateMethod("hf-generate", target.model), plain, *drafting.values()]

    starts = torch.randint(target.vocab_size, (args.prompts, args.prompt_tokens)).tolist()
    prompts = [BenchPrompt(str(i), "random", f"random:{i}", ids) for i, ids in enumerate(starts)]
    names = [method.name for method in methods]
    settings = Settings("random", names, max_new_tokens=args.max_new_tokens, repeat=args.repeat)
    turns = take_turns(settings, methods, prompts, None)
    record = build_record(prompts, {method.name: method.describe() for method in methods}, turns)

    embedding = target.model.get_input_embeddings().weight
    read = tensor_bytes(target.model.parameters()) - tensor_bytes([embedding[1:]])  # of it a token reads one row
    speed = copy_speed(device, args.copy_bytes)
    rounds = {}
    for name, method in drafting.items():
        runs = [turn.runs[name] for turn in turns]
        forwards = sum(run.answers[0].target_forwards or 0 for run in runs)
        whole = sum(run.seconds - run.prefill_seconds for run in runs) / max(forwards, 1)
        models = model_seconds_per_round(method, drafters[name], starts[0], args.max_new_tokens)
        found = {"milliseconds": 1e3 * whole, "model_milliseconds": 1e3 * models}
        rounds[name] = {**found, "overhead_fraction": max(1 - models / whole, 0.0) if whole else None}
    return {
        **record,
        "rounds": rounds,
        "bandwidth": {
            "copy_bytes_per_second": speed,
            "weight_bytes_per_token": read,
            "share": {
                name: read * (record["methods"][name]["decode_tokens_per_second"] or 0.0) / speed for name in names[:2]
            },
        },
        "settings": {**settings_of(args), "shape": config.to_dict()},
        "environment": environment(command) | {"device": str(device)},
    }


def report(record: dict[str, Any]) -> str:
    """The benchmark's tables, and the two shares."""
    lines = [bench_table(record), ""]
    for name, share in record["bandwidth"]["share"].items():
        lines.append(f"{name} reads weights at {100 * share:.0f} % of the speed of a device copy")
    for name, found in record["rounds"].items():
        overhead = f"{100 * (found['overhead_fraction'] or 0.0):.1f} % of it outside of target and drafter"
        lines.append(f"{name}: {found['milliseconds']:.1f} ms a round, {overhead}")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", help="directory or hub id whose config gives the shape (default: Llama-3.1-8B's)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=NUMBER", help="change a size, num_hidden_layers=8")
    parser.add_argument("--chance", nargs="+", type=float, default=[0.6, 0.7, 0.8], help="of a draft (%(default)s)")
    parser.add_argument("--tree", default="6,10,60", help="DEPTH,WIDTH,NODES of the head (%(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="ids that the head drafts (%(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--copy-bytes", type=int, default=2**30, help="that are copied (%(default)s)")
    parser.add_argument("--dtype", default="bf16", help="(%(default)s)")
    parser.add_argument("--cuda-graphs", action="store_true", help="as of fsd-infer")
    parser.add_argument("--device", help="default: CUDA where there is one")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print it."""
    return record_main("benchmarks.gpu", build_parser(), measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
