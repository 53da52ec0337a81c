"""Chains against trees for small LMs as drafters: tokens per target forward, and per cost where a draft costs c.

Every shape decodes every prompt by every rule. A round's cost is counted, not timed: 1 for the target's forward and c
for each forward of the small LM, so the tokens per cost hold for any machine on which a forward over the tree's nodes
costs as much as one over a single token. Decoding is greedy, and ``auto`` is seeded, so the record comes again.

Example: python -m benchmarks.small_lms --drafter smollm2-135m-maths --prompts data/smollm2-135m-answers.jsonl.gz \
    --json benchmarks/results/small-lms-sibling.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.recorded import record_main, settings_of
from fsd_bench.environment import environment
from fsd_infer.chat.rows import read_jsonl
from fsd_infer.cli.report import number, table
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import LMDrafter
from fsd_infer.drafters.loading import choose_trees
from fsd_infer.drafters.shape import AUTO, TreeShape
from fsd_infer.errors import FsdError

SHAPES = "5,1,6;8,1,9;15,1,16;5,6,16;8,2,16;8,4,24;auto"
COSTS = (0.05, 0.1, 0.2, 0.4, 1.0)


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_lms", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", required=True, help="a small LM of the target's vocabulary, self:... too")
    parser.add_argument("--rules", default="exact", help="by semicolons (%(default)s)")
    parser.add_argument(
        "--shapes", default=SHAPES, help="depth,width,nodes by semicolons; width 1: chains (%(default)s)"
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `prompt` or `messages`")
    parser.add_argument("--limit", type=int, default=16, help="prompts, evenly spread over the file (%(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the texts, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, required=True)
    return parser


def prompts_of(path: Path, limit: int) -> list[Any]:
    """Texts, or conversations without what is answered last."""
    rows = [row for _, row in read_jsonl(path)]
    found = []
    for row in rows[:: max(len(rows) // limit, 1)][:limit]:
        messages = row.get("messages")
        found.append(row["prompt"] if messages is None else [m for m in messages if m["role"] != "assistant"][:2])
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{rule: {shape: {"tokens", "target_forwards", "draft_forwards", "tau" by prompt}}}."""
    torch.set_num_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(args.target, args.drafter)
    drafter = decoder.drafter
    if not isinstance(drafter, LMDrafter):
        raise FsdError(f"{args.drafter} is no small LM: name one.")
    forwards = 0
    forward = drafter.model.forward

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return forward(*given, **named)

    drafter.model.forward = counted  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for rule in args.rules.split(";"):
        for name in args.shapes.split(";"):
            shaped = choose_trees(drafter) if name == AUTO else drafter.reshaped(TreeShape.parse(name))
            facts: dict[str, Any] = {"tokens": 0, "target_forwards": 0, "draft_forwards": 0, "tau": []}
            for prompt in prompts_of(args.prompts, args.limit):
                forwards = 0
                stats = decoder.generate(
                    prompt, rule, drafter=shaped, max_new_tokens=args.max_new_tokens, temperature=0.0, seed=0,
                    chat=False if args.raw else None,
                ).stats  # fmt: skip
                facts["tokens"] += stats.new_tokens
                facts["target_forwards"] += stats.target_forwards
                facts["draft_forwards"] += forwards - 1  # but the one over the prompt
                facts["tau"].append(round(stats.tau, 3))
            found.setdefault(rule, {})[name] = facts
            print(rule, name, facts["tokens"] / facts["target_forwards"], file=sys.stderr, flush=True)
    return found


def report(record: dict[str, Any]) -> str:
    """A table per rule."""
    parts = []
    for rule, shapes in record["rules"].items():
        rows = []
        for name, facts in shapes.items():
            tokens, target, draft = (facts[key] for key in ("tokens", "target_forwards", "draft_forwards"))
            costs = [number(tokens / (target + c * draft)) for c in COSTS]
            rows.append([name, number(tokens / target), number(draft / target), *costs])
        parts.append(
            table([rule, "tokens / forward", "drafting forwards", *(f"per cost, c = {c}" for c in COSTS)], rows)
        )
    return "\n\n".join(parts)


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record of a command line. Raises FsdError."""
    rules = measure(args)
    settings = settings_of(args) | {"prompts": args.prompts.name}
    settings |= {key: Path(settings[key]).name for key in ("target", "drafter") if os.path.isdir(settings[key])}
    del settings["json"]
    return {"rules": rules, "settings": settings, "environment": environment(command)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print its tables."""
    return record_main("benchmarks.small_lms", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
