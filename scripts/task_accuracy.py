"""Share of tasks that a target solves by greedy decoding, with plain transformers.

    python scripts/task_accuracy.py --target smollm2-135m-maths --tasks data/word-problems.jsonl.gz multiarith_dev.json

Tasks are prompt files whose rows have an ``answer`` (a number, ``#### N``, an option). Shares are given for each file
and each ``source`` in it, with 95 % Wilson intervals; ``--output`` writes them, all answers and the
environment as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fsd_infer.bench.environment import environment
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json
from fsd_infer.targets.loading import load_target
from fsd_train.task_score import greedy_answers, read_tasks


def share(right: Sequence[float]) -> dict[str, float]:
    """``count``, ``accuracy`` and its 95 % Wilson interval ``low`` to ``high``."""
    n, p, z = len(right), sum(right) / len(right), 1.96
    middle, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * width) / (1 + z * z / n) for sign in (-1, 1))
    return {"count": n, "accuracy": round(p, 4), "low": round(max(low, 0.0), 4), "high": round(min(high, 1.0), 4)}


def score_file(model: Any, tokenizer: Any, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Record of one file of tasks."""
    tasks = read_tasks(path, tokenizer, args.limit, args.seed)
    groups: dict[str, list[float]] = defaultdict(list)
    answers = []
    made = greedy_answers(model, [task.ids for task in tasks], args.max_new_tokens, args.batch_size)
    for number, ids in tqdm(made, total=len(tasks), desc=path.name, unit="task"):
        task, text = tasks[number], tokenizer.decode(ids, skip_special_tokens=True)
        right = task.reference.score(text)
        groups[task.source].append(right)
        answers.append((number, {"right": right, "tokens": len(ids), "answer": text}))
    record = {**share([right for group in groups.values() for right in group]), "file": path.name}
    if len(groups) > 1:
        record["sources"] = {name: share(groups[name]) for name in sorted(groups)}
    record["answers"] = [answer for _, answer in sorted(answers, key=lambda pair: pair[0])]
    return record


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, help="built-in name, directory (of a model or an adapter) or hub id")
    p.add_argument("--tasks", type=Path, nargs="+", required=True)
    p.add_argument("--output", type=Path, help="JSON file for the record")
    p.add_argument("--limit", type=int, help="a random sample of so many tasks per file")
    p.add_argument("--seed", type=int, default=0, help="of that sample")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--dtype", default="bf16")
    p.add_argument("--device")
    args = p.parse_args(argv)
    try:
        model, tokenizer = load_target(args.target, dtype=args.dtype, device=args.device)
        if tokenizer is None:
            raise FsdError(f"{args.target} has no tokenizer to encode the tasks with.")
        records = []
        for path in args.tasks:
            records.append(score_file(model, tokenizer, path, args))
            print(json.dumps({name: value for name, value in records[-1].items() if name != "answers"}))
            if args.output is not None:  # after each file: a stopped run loses nothing
                settings = {name: str(value) for name, value in vars(args).items() if name not in ("tasks", "output")}
                write_json(
                    args.output, {"settings": settings, "environment": environment(), "tasks": records}, indent=1
                )
    except FsdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
