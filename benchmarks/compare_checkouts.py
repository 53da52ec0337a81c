"""Compare the speed of two checkouts of this repository, each in processes of its own, in turns.

    git worktree add --detach ../before 5f0b370
    python -m benchmarks.compare_checkouts ../before . --json speed.json

This is an isolated benchmark (``fsd-bench run --isolate``) of ``old RULE`` and ``new RULE``. It reports ratios of
speed over blocks with intervals, accepted lengths, and how many answers agree. With ``--batch 8`` each call gets eight
prompts, and a rate is the whole batch's. Any two commits can be compared, because only names that have been public
since the first release are used. Both run in this process's environment.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def serve_checkout(words: Sequence[str]) -> None:
    """Decode for the benchmark until standard input ends: ``CHECKOUT RULE DRAFTER TARGET THREADS TREE...``."""
    checkout, rule, drafter, target, threads, *tree = words
    sys.path[:0] = [checkout, str(ROOT / "benchmarks" / "peers")]
    from protocol import Answer, serve

    def load() -> tuple[Answer, dict[str, Any]]:
        import torch

        from fsd_infer import FuzzyDecoder, TreeShape

        torch.set_num_threads(int(threads))
        shape = "auto" if tree == ["auto"] else TreeShape(*map(int, tree))
        decoder = FuzzyDecoder.from_pretrained(target, drafter, dtype=torch.bfloat16, device="cpu", tree=shape)

        def answer(prompts: list[list[int]], new: int, temperature: float, seed: int) -> dict[str, Any]:
            options = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
            start = time.perf_counter()
            out = decoder.generate(prompts, rule=rule, max_new_tokens=new, seed=seed, **options)
            seconds = time.perf_counter() - start
            answers = [
                {
                    "tokens": tokens, "stopped": row.finish_reason == "stop", "forwards": row.target_forwards,
                    "verified": row.new_tokens - 1,
                }
                for tokens, row in zip(out.sequences, out.stats.rows)
            ]  # fmt: skip
            return {"seconds": seconds, "first": out.stats.prefill_seconds, "answers": answers}

        return answer, {"by": "checkout", "commit": commit(Path(checkout)), "drafter_name": Path(drafter).name}

    serve(load, batches=True)


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if files differ."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def label(rule: str) -> str:
    """Return the rule as a label of a method may spell it."""
    return rule.replace(":", " ")


def one_category(source: Path, directory: Path) -> Path:
    """Write the rows with one category to a file of the same name. Batches keep to a category, so all are full."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    file = directory / source.name
    file.write_text("".join(json.dumps({**row, "category": "all"}) + "\n" for row in rows), encoding="utf-8")
    return file


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both checkouts, print the tables and write the record."""
    from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, run_resumed
    from benchmarks.workplace import shown_command
    from fsd_bench.record import write_record
    from fsd_bench.report import bench_table

    parser = parser_of(
        "benchmarks.compare_checkouts", __doc__, rules="plain,exact", target=BUILT_IN,
        drafter=("shipped+lookup", "drafter of all rules but plain"),
        tree=(["5", "6", "16"], "DEPTH WIDTH NODES or auto"), prompts=PROMPTS, batch=1,
        limit=(None, "prompts (default: 24 times the batch)"),
        every=(None, "take every N-th row (default: 10 divided by the batch)"), tokens=(64, "new tokens per answer"),
        temperature=0.0, blocks=6, threads=2, json=(None, "file of the record; an unfinished one is continued"),
    )  # fmt: skip
    parser.add_argument("old", type=Path, help="a checkout of this repository")
    parser.add_argument("new", type=Path, help="another one")
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    places = {"old": args.old.resolve(), "new": args.new.resolve()}
    rules = args.rules.split(",")
    methods = []
    for rule in rules:
        exact, drafter = ("exact", "none") if rule == "plain" else (rule, args.drafter)
        for which, place in places.items():
            words = [str(place), exact, drafter, args.target, str(args.threads), *args.tree]
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", *words]
            methods.append(f"{which} {label(rule)}=command:{shlex.join(command)}")
    with tempfile.TemporaryDirectory() as directory:
        record = run_resumed(
            args.prompts if args.batch == 1 else one_category(args.prompts, Path(directory)), methods, args.json,
            target=args.target, limit=args.limit or 24 * args.batch, every=args.every or max(1, 10 // args.batch),
            batch_size=args.batch, max_new_tokens=args.tokens, temperature=args.temperature, isolate=args.blocks,
            threads=args.threads, baselines=[f"old {label(rule)}" for rule in rules],
        )  # fmt: skip
    print(bench_table(record))
    if args.json:  # without this machine's paths
        settings = {**record["settings"], "methods": list(record["methods"]), "target": Path(args.target).name}
        record["environment"]["command"] = shlex.join(shown_command("benchmarks.compare_checkouts", words))
        write_record(args.json, {**record, "settings": settings})
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_checkout(sys.argv[2:])
    else:
        sys.exit(main())
