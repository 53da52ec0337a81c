"""What one way to draft gains, all else equal: accepted length and speed with it and without.

Both methods decode the same prompts in turns under the exact rule, with the same head and tree. What is varied:

* ``context-ids``: the ids of each text join a reduced draft vocabulary (``EagleDrafter(context_ids=...)``);
* ``weights``: the head's weights are read as fp8 instead of bf16, by our CPU kernels (``FuzzyDecoder(quantize=...)``).

Run: python -m benchmarks.draft_variants VARIED [--tree D,W,N] [--batch-size B] [--limit N --every K] [--json RECORD]
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.workplace import shown_command
from fsd_infer.bench import Settings, build_record, make_methods
from fsd_infer.bench.engine import EngineMethod
from fsd_infer.bench.environment import environment
from fsd_infer.bench.models import Models
from fsd_infer.bench.record import jsonable
from fsd_infer.bench.runner import encode_rows, models_of, read_rows, take_turns
from fsd_infer.cli.commands import parse_tree
from fsd_infer.cli.report import number, table
from fsd_infer.drafters import Drafter, EagleDrafter
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json

ROOT = Path(__file__).resolve().parent.parent
METHODS = ["without=exact", "with=exact"]


def _context_ids(models: Models) -> list[Drafter]:
    head = models.load(models.drafter)
    if not isinstance(head, EagleDrafter) or not head.context_ids:
        raise FsdError(f"drafter {head.name!r} is no head with a reduced draft vocabulary: give --drafter.")
    without = head.reshaped(head.shape)
    without.context_ids = False
    return [without, head]


def _weights(models: Models) -> list[Drafter]:
    pair = []
    for models.decoder.quantize in (False, True):
        pair.append(models.decoder.load_drafter(models.drafter, models.tree))
    if "weights" not in pair[1].describe():
        raise FsdError(
            f"drafter {pair[1].name!r} has no fp8 weights here: that takes a head in bf16 and our CPU kernels."
        )
    return pair


VARIED: dict[str, Callable[[Models], list[Drafter]]] = {"context-ids": _context_ids, "weights": _weights}


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_variants", description=__doc__.split("\n\n")[0])
    parser.add_argument("varied", choices=VARIED)
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", help="a head (default: the one shipped)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--limit", type=int, help="prompts (default: all)")
    parser.add_argument("--every", type=int, default=1, help="each so-many-th row (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--tree", default="5,6,16", help="DEPTH,WIDTH,NODES or auto (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--dtype", default="bf16", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="the record (default: benchmarks/results/VARIED.json)")
    return parser


def measure(varied: str, settings: Settings, progress: bool = False) -> dict[str, Any]:
    """A bench record of both methods.

    Raises:
        FsdError: whatever a benchmark raises, and a drafter that cannot be varied so.
    """
    settings.check()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    models = models_of(settings)
    methods = make_methods(settings.methods, models)
    for method, drafter in zip(methods, VARIED[varied](models), strict=True):
        assert isinstance(method, EngineMethod)
        method.drafter = drafter
    asked = encode_rows(read_rows(settings), models)
    described = {method.name: method.describe() for method in methods}
    turns = take_turns(settings, methods, asked, None, progress)
    record = build_record(asked, described, turns, settings.seed, settings.baselines)
    return jsonable({**record, "varied": varied, "settings": settings.to_dict(), "environment": environment()})


def report(record: dict[str, Any]) -> str:
    """Accepted length by category and the mean over categories; speed, and its ratio with the interval."""
    pair = [record["methods"][name] for name in ("without", "with")]
    rows = [[name, *(number(one["categories"][name]["tau"], 2) for one in pair)] for name in pair[0]["categories"]]
    rows.append(["mean", *(number(one["tau_category_mean"], 3) for one in pair)])
    ratio = record["ratios"]["without"]["with"]["decode_tokens_per_second"]
    speed = ", ".join(number(one["decode_tokens_per_second"], 1) for one in pair)
    return (
        f"{record['varied']}\n{table(['tau of', 'without', 'with'], rows)}\n"
        f"tok/s behind the prefill {speed}; with / without {number(ratio['median'], 3)} "
        f"({number(ratio['low'], 3)}-{number(ratio['high'], 3)}, 95 %)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print the tables."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    try:
        settings = Settings(
            args.prompts, METHODS, target=args.target, drafter=args.drafter, tree=parse_tree(args.tree),
            dtype=args.dtype, limit=args.limit, every=args.every, max_new_tokens=args.max_new_tokens,
            repeat=args.repeat, threads=args.threads, batch_size=args.batch_size, baselines=["without"],
        )  # fmt: skip
        record = measure(args.varied, settings, progress=True)
    except FsdError as error:
        print(f"draft_variants: {error}", file=sys.stderr)
        return 2
    record["environment"]["command"] = shlex.join(shown_command("benchmarks.draft_variants", argv))
    path = args.json or ROOT / "benchmarks" / "results" / f"{args.varied}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record, indent=1)
    print(report(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
