"""Is one checkout of this repository faster than another? Each decodes in processes of its own, in turns.

    git worktree add --detach ../before 5f0b370
    python -m benchmarks.compare_checkouts ../before . --json speed.json

A benchmark in isolated mode (``fsd-infer bench --isolate``) of ``old RULE`` and ``new RULE``: ratios of speed over
blocks with intervals, accepted lengths, and how many answers agree. With ``--batch 8`` each call gets eight prompts,
and a rate is the whole batch's. Only names that have been public since the first release are used, so any two commits
can be compared. Both run in this process's environment.
"""

from __future__ import annotations

import argparse
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
    """Be the process that decodes: ``CHECKOUT RULE DRAFTER TARGET THREADS TREE...``."""
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
            out = decoder.generate(prompts, rule, max_new_tokens=new, seed=seed, **options)
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
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def label(rule: str) -> str:
    """As a method may be called."""
    return rule.replace(":", " ")


def one_category(source: Path, directory: Path) -> Path:
    """A file of the same name whose rows share a category, since batches keep to one: so all of them are full."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    file = directory / source.name
    file.write_text("".join(json.dumps({**row, "category": "all"}) + "\n" for row in rows), encoding="utf-8")
    return file


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of this repository")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--rules", default="plain,exact", help="comma-separated (%(default)s)")
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--drafter", default="shipped+lookup", help="of all rules but plain (%(default)s)")
    parser.add_argument("--tree", nargs="+", default=["5", "6", "16"], help="DEPTH WIDTH NODES or auto (%(default)s)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="prompts of a call (%(default)s)")
    parser.add_argument("--limit", type=int, help="prompts (default: 24 times N)")
    parser.add_argument("--every", type=int, help="each so-many-th row (default: 10 divided by N)")
    parser.add_argument("--tokens", type=int, default=64, help="new ones per answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=6, help="of prompts (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="record; an unfinished one is continued")
    given = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(given)
    from benchmarks.workplace import shown_command
    from fsd_bench import run
    from fsd_bench.record import write_record
    from fsd_bench.report import bench_table

    places = {"old": args.old.resolve(), "new": args.new.resolve()}
    rules = args.rules.split(",")
    methods = []
    for rule in rules:
        exact, drafter = ("exact", "none") if rule == "plain" else (rule, args.drafter)
        for which, place in places.items():
            words = [str(place), exact, drafter, args.target, str(args.threads), *args.tree]
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", *words]
            methods.append(f"{which} {label(rule)}=command:{shlex.join(command)}")
    partial = args.json and args.json.with_name(args.json.name + ".partial.jsonl")
    with tempfile.TemporaryDirectory() as directory:
        record = run(
            args.prompts if args.batch == 1 else one_category(args.prompts, Path(directory)), methods,
            target=args.target, limit=args.limit or 24 * args.batch, every=args.every or max(1, 10 // args.batch),
            batch_size=args.batch, max_new_tokens=args.tokens, temperature=args.temperature, isolate=args.blocks,
            threads=args.threads, progress=True, baselines=[f"old {label(rule)}" for rule in rules],
            json_path=args.json, resume=bool(partial and partial.exists()),
        )  # fmt: skip
    print(bench_table(record))
    if args.json:  # nothing of this machine
        settings = {**record["settings"], "methods": list(record["methods"]), "target": Path(args.target).name}
        record["environment"]["command"] = shlex.join(shown_command("benchmarks.compare_checkouts", given))
        write_record(args.json, {**record, "settings": settings})
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_checkout(sys.argv[2:])
    else:
        sys.exit(main())
