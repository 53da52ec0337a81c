"""What a head with a reduced draft vocabulary gains by the ids of each text: accepted length with and without them.

Both methods decode the same prompts in turns, with the same head and tree; ``without`` drafts the head's own
vocabulary alone (``EagleDrafter(context_ids=False)``).

Run: python -m benchmarks.context_ids [--tree D,W,N] [--batch-size B] [--limit N --every K] [--json RECORD]
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.workplace import shown_command
from fsd_infer.bench import Settings, build_record, make_methods
from fsd_infer.bench.engine import EngineMethod
from fsd_infer.bench.environment import environment
from fsd_infer.bench.record import jsonable
from fsd_infer.bench.runner import encode_rows, models_of, read_rows, take_turns
from fsd_infer.commands import parse_tree
from fsd_infer.drafters import EagleDrafter
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json
from fsd_infer.report import number, table

ROOT = Path(__file__).resolve().parent.parent
METHODS = ["without=exact", "with=exact"]


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_ids", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", help="a head with a reduced draft vocabulary (default: the one shipped)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--limit", type=int, help="prompts (default: all)")
    parser.add_argument("--every", type=int, default=1, help="each so-many-th row (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--tree", default="5,6,16", help="DEPTH,WIDTH,NODES (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--dtype", default="bf16", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "context-ids.json")
    return parser


def measure(settings: Settings, progress: bool = False) -> dict[str, Any]:
    """A bench record of both methods.

    Raises:
        FsdError: whatever a benchmark raises, and a drafter that is no head with a reduced draft vocabulary.
    """
    settings.check()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    models = models_of(settings)
    methods = make_methods(settings.methods, models)
    for method, joined in zip(methods, (False, True), strict=True):
        assert isinstance(method, EngineMethod)
        head = method.drafter
        if not isinstance(head, EagleDrafter) or not head.context_ids:
            raise FsdError(f"drafter {head.name!r} is no head with a reduced draft vocabulary: give --drafter.")
        method.drafter = head.reshaped(head.shape)
        method.drafter.context_ids = joined
    asked = encode_rows(read_rows(settings), models)
    described = {method.name: method.describe() for method in methods}
    turns = take_turns(settings, methods, asked, None, progress)
    record = build_record(asked, described, turns, settings.seed, settings.baselines)
    return jsonable({**record, "settings": settings.to_dict(), "environment": environment()})


def categories_table(record: dict[str, Any]) -> str:
    """Accepted length by category, and the mean over categories."""
    without, joined = (record["methods"][name] for name in ("without", "with"))
    rows = [
        [name, number(one["tau"], 2), number(joined["categories"][name]["tau"], 2)]
        for name, one in without["categories"].items()
    ]
    rows.append(["mean", number(without["tau_category_mean"], 3), number(joined["tau_category_mean"], 3)])
    return table(["tau of", "without", "with"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print the table."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    try:
        settings = Settings(
            args.prompts, METHODS, target=args.target, drafter=args.drafter, tree=parse_tree(args.tree),
            dtype=args.dtype, limit=args.limit, every=args.every, max_new_tokens=args.max_new_tokens,
            threads=args.threads, batch_size=args.batch_size, baselines=["without"],
        )  # fmt: skip
        record = measure(settings, progress=True)
    except FsdError as error:
        print(f"context_ids: {error}", file=sys.stderr)
        return 2
    record["environment"]["command"] = shlex.join(shown_command("benchmarks.context_ids", argv))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.json, record, indent=1)
    print(categories_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
