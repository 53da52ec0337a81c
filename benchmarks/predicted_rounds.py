"""What `fsd-infer estimate` predicts for this machine's CPU, beside what its rounds take.

The machine's bandwidth and peak are measured as `benchmarks.forward_limits` does, a plain token and an exact round of
a target and a head are predicted from their configs by these two numbers, and then a few prompts are decoded. Run it on
an idle machine.

    python -m benchmarks.predicted_rounds --json benchmarks/results/predicted-rounds.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import forward_limits
from benchmarks.recorded import record_main, settings_of
from fsd_bench.environment import environment
from fsd_infer.chat.encoding import read_prompts
from fsd_infer.cli.report import number, table
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.device.roofline import Hardware, Work
from fsd_infer.drafters import EagleDrafter, NoDrafter
from fsd_infer.errors import DataError, FsdError
from fsd_infer.estimate import Planned
from fsd_infer.heads.config import EagleConfig
from fsd_infer.heads.head import EagleHead
from fsd_infer.planned import planned_target
from fsd_infer.stats import GenerationStats

PHASES = {"draft": ("head", "features"), "target": ("target",), "rule": ("rule",)}  # of a round, and their predictions


def measured(stats: Sequence[GenerationStats]) -> dict[str, float]:
    """Milliseconds of a round: all of it without the prefill, and each phase."""
    rounds = sum(each.target_forwards for each in stats)
    spent = {name: 1e3 * sum(each.phases.get(name, 0.0) for each in stats) / rounds for name in PHASES}
    whole = 1e3 * sum(each.seconds - each.prefill_seconds for each in stats) / rounds
    return {"round": whole, **spent, "tau": sum(each.tau * each.target_forwards for each in stats) / rounds}


def predicted(work: Sequence[Work], hardware: Hardware) -> dict[str, float]:
    """The same by the roofline."""
    least = {each.name: 1e3 * each.seconds(hardware) for each in work}
    phases = {phase: sum(least.get(name, 0.0) for name in names) for phase, names in PHASES.items()}
    return {"round": sum(least.values()), **phases}


def measure(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record: see the module's description. Raises FsdError."""
    if args.threads:
        torch.set_num_threads(args.threads)
    limits = forward_limits.measure(args.target, [1], 128, 10)
    speeds = limits["bytes_read_per_second"], limits["operations_per_second"]
    hardware = Hardware("this machine", 0.0, *speeds, source="benchmarks.forward_limits")
    decoder = FuzzyDecoder.from_pretrained(args.target, dtype=torch.bfloat16, device="cpu")
    drafter = decoder.drafter
    if not isinstance(drafter, EagleDrafter):
        raise FsdError(f"{args.target} has no shipped head: name a target that has one.")
    rows = itertools.islice(read_prompts(args.prompts), args.limit)
    prompts = [decoder.encode(list(row.messages)) for row in rows]
    if not prompts:
        raise DataError(f"{args.prompts} holds no prompts.")
    found: dict[str, list[GenerationStats]] = {"plain": [], "exact": []}
    methods = {"plain": NoDrafter(decoder.target.vocab_size), "exact": drafter}
    for turn in range(args.repeats + 1):
        for prompt in prompts:
            for name, each in methods.items():
                made = decoder.generate([prompt], drafter=each, max_new_tokens=args.max_new_tokens, do_sample=False)
                if turn:  # first calls allocate
                    found[name].append(made.stats)
    target = planned_target(args.target)
    narrow = 1 if drafter.describe().get("weights") == "fp8" else 2
    context = round(sum(map(len, prompts)) / len(prompts)) + args.max_new_tokens // 2
    planned = Planned(target, _same_head(drafter.head.config), context=context, head_weight=narrow)
    work = {"plain": planned.plain(), "exact": planned.round(drafter.shape)}
    pairs = {
        name: {"predicted": predicted(work[name], hardware), "measured": measured(stats)}
        for name, stats in found.items()
    }
    return {
        "bytes_read_per_second": speeds[0],
        "operations_per_second": speeds[1],
        "context": context,
        "drafter": drafter.describe(),
        "milliseconds": pairs,
        "measured_over_predicted": {
            name: pair["measured"]["round"] / pair["predicted"]["round"] for name, pair in pairs.items()
        },
        "settings": settings_of(args),
        "environment": environment(command),
    }


def _same_head(config: EagleConfig) -> EagleHead:
    with torch.device("meta"):
        return EagleHead(config).to(torch.bfloat16)


def report(record: dict[str, Any]) -> str:
    """Milliseconds, predicted and measured."""
    rows = []
    for name, pair in record["milliseconds"].items():
        for part in ("round", *PHASES):
            least, took = pair["predicted"][part], pair["measured"][part]
            rows.append([f"{name}: {part}", number(least), number(took), number(took / least if least else None)])
    return table(["milliseconds", "predicted", "measured", "ratio"], rows)


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    results = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted_rounds", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="one with a shipped head (%(default)s)")
    parser.add_argument("--prompts", default="data/spec_bench_dev.jsonl", help="(%(default)s)")
    parser.add_argument("--limit", type=int, default=6, help="prompts (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--json", type=Path, default=results / "predicted-rounds.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print it."""
    return record_main("benchmarks.predicted_rounds", build_parser(), measure, report, argv)


if __name__ == "__main__":
    sys.exit(main())
