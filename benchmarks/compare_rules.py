"""Acceptance rules side by side: exact, gates, the optimal rule at several prices, and the published rivals.

One interleaved run per temperature and drafter: tok/s, tau, forwards, length, log-likelihood, repetition. At
temperature 0 rules that let more drafts through take a deeper tree than exact (--lossy-tree). The same command goes on
after an interruption.

Run: python -m benchmarks.compare_rules [--temperature 1] [--lookup] [--target NAME_OR_DIRECTORY] [--drafter HEAD]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.workplace import Workplace, shown_command
from fsd_bench import run
from fsd_bench.report import bench_table
from fsd_infer.errors import FsdError

ROOT = Path(__file__).resolve().parent.parent
BUILT_IN = "smollm2-135m"
GATES = [f"fuzzy:js:{threshold}" for threshold in (0.2, 0.3, 0.4)]
TILTED = ["tilted", "tilted:novel=0", "tilted:1.5", "tilted:1:floor=0"]
NOVEL = ":novel=3"  # as tilted has it; every rival runs with and without
# At the source's default; where it has none (lenient, cactus, ensemble) or its default is exact (threshold) in between.
RIVALS = ["lenient:0.5", "typical", "relaxed", "threshold:0.3", "cactus:0.25", "cascade-token", "ensemble:0.5"]


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_rules", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default=BUILT_IN, help="(%(default)s)")
    parser.add_argument("--drafter", default="shipped", help="head of the target (%(default)s)")
    parser.add_argument("--lookup", action="store_true", help="graft n-gram lookup onto the head")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--tree", default="6x4x9x0.5", help="of exact (%(default)s)")
    parser.add_argument("--lossy-tree", help="of all other rules (10x2x11x0.2 at temperature 0, else that of exact)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--limit", type=int, default=40, help="prompts (%(default)s)")
    parser.add_argument("--every", type=int, default=6, help="each so-many-th row (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded together (%(default)s)")
    parser.add_argument("--rules", help="these instead, comma-separated")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the record")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    return parser


def methods(args: argparse.Namespace, drafter: str) -> list[str]:
    """Of the bench, each rule with its tree, and exact with that of the others too where it is another."""
    rivals = [*RIVALS, "fly:4"] if args.temperature == 0 else RIVALS  # 6 drafts, its default, are nearly the whole tree
    both = [rule + novel for rule in (*GATES[1:], *rivals) for novel in ("", NOVEL)]
    rules = args.rules.split(",") if args.rules else [*TILTED, *both]
    drafter += "+lookup" if args.lookup else ""
    lossy_tree = args.lossy_tree or (args.tree if args.temperature else "10x2x11x0.2")
    found = [f"exact=exact@{drafter}@{args.tree}"]
    if lossy_tree != args.tree:
        found.append(f"exact deep=exact@{drafter}@{lossy_tree}")
    return found + [f"{rule.replace(':', ' ').replace('=', ' ')}={rule}@{drafter}@{lossy_tree}" for rule in rules]


def record_path(args: argparse.Namespace) -> Path:
    """Where the record goes."""
    name = Path(os.path.abspath(args.target)).name
    grafted = "-lookup" if args.lookup else ""
    return args.output.resolve() / f"rules-{name}-t{args.temperature:g}{grafted}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure. 2 after bad input, 130 after an interrupt."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    record = record_path(args)
    args.output.mkdir(parents=True, exist_ok=True)
    work = Workplace(ROOT / "runs" / record.stem)
    target, prompts = work.link(args.target), work.link(args.prompts)
    drafter = args.drafter if args.drafter == "shipped" else work.link(args.drafter)
    os.chdir(work.directory)
    try:
        found = run(
            prompts, methods(args, drafter), json_path=record, progress=True,
            resume=record.with_name(record.name + ".partial.jsonl").exists(),
            command=shown_command("benchmarks.compare_rules", argv), target=target, drafter=drafter,
            limit=args.limit, every=args.every, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
            threads=args.threads, batch_size=args.batch_size, log_likelihood=True, score="none", baselines=["exact"],
        )  # fmt: skip
    except FsdError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last finished answer.", file=sys.stderr)
        return 130
    print(bench_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
