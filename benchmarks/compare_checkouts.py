"""Is one checkout of this repository faster than another? Each decodes in processes of its own, in turns.

    git worktree add --detach ../before 5f0b370
    python benchmarks/compare_checkouts.py ../before . --target smollm2-135m --json speed.json

A block is one process per checkout, which loads the models, warms up and decodes the same prompts with every method;
the order within a block alternates. Reported per method: the ratio of tokens per second, prefill left out, paired by
block and prompt, with its bootstrap interval, the same for the seconds of reading a prompt, and how many answers agree.
Only names that have been public since the first release are used, so any two commits can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METHODS = {"plain": "none", "exact": None}  # name -> drafter; None: the one that is asked for


def prompts(file: Path, limit: int) -> list[str]:
    """Prompts of a .jsonl file with ``prompt`` or ``turns``, evenly spread over it."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [row.get("prompt") or row["turns"][0] for row in rows]
    return texts[:: max(1, len(texts) // limit)][:limit]


def work(settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What one process measures: per method and prompt the answer, its tokens per second and the prompt's seconds."""
    from fsd_infer import FuzzyDecoder, TreeShape

    shape = TreeShape(*settings["tree"])
    decoder = FuzzyDecoder.from_pretrained(settings["target"], settings["drafter"], device="cpu", tree=shape)
    drafters = {name: decoder.drafter if what is None else decoder.load_drafter(what) for name, what in METHODS.items()}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for text in settings["prompts"][:1] + settings["prompts"]:  # the first one twice: it warms up
        for name, drafter in drafters.items():
            out = decoder.generate([text], drafter=drafter, max_new_tokens=settings["tokens"], do_sample=False)
            seconds = out.stats.seconds - out.stats.prefill_seconds
            speed = (len(out.sequences[0]) - 1) / seconds
            found[name].append({"speed": speed, "prefill": out.stats.prefill_seconds, "answer": out.sequences[0]})
    return {name: answers[1:] for name, answers in found.items()}


def run(checkout: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """:func:`work` in a process that imports from ``checkout``."""
    command = [sys.executable, str(Path(__file__).resolve()), "--work", json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compared(blocks: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Ratios, second checkout to first, of (first, second) blocks."""
    from fsd_infer.bench.record import interval

    found = {}
    for name in METHODS:
        pairs = [pair for old, new in blocks for pair in zip(old[name], new[name], strict=True)]
        found[name] = {
            "speed": [sum(side[i]["speed"] for side in pairs) / len(pairs) for i in (0, 1)],
            "speed_ratio": interval([new["speed"] / old["speed"] for old, new in pairs]),
            "prefill_seconds_ratio": interval([new["prefill"] / old["prefill"] for old, new in pairs]),
            "equal_answers": sum(old["answer"] == new["answer"] for old, new in pairs) / len(pairs),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of this repository")
    parser.add_argument("new", type=Path, help="another one")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="shipped+lookup")
    parser.add_argument("--tree", type=int, nargs=3, default=(5, 6, 16))
    parser.add_argument("--prompts", type=Path, default=Path("data/quickstart_prompts.jsonl"))
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per answer")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="record")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(args.new.resolve()))
    from fsd_infer.bench.environment import environment
    from fsd_infer.files import write_json

    checkouts = [path.resolve() for path in (args.old, args.new)]
    commits = [
        subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        for path in checkouts
    ]
    settings = {
        "target": args.target,
        "drafter": args.drafter,
        "tree": list(args.tree),
        "tokens": args.tokens,
        "prompts": prompts(args.prompts, args.limit),
    }
    blocks = []
    for block in range(args.blocks):
        order = (0, 1) if block % 2 == 0 else (1, 0)
        made = {which: run(checkouts[which], settings) for which in order}
        blocks.append((made[0], made[1]))
        for name, facts in compared(blocks).items():
            ratio, old_new = facts["speed_ratio"], "{:.1f} -> {:.1f}".format(*facts["speed"])
            print(
                f"{block + 1} blocks, {name}: {old_new} tok/s, {ratio['median']:.3f} "
                f"({ratio['low']:.3f} to {ratio['high']:.3f}), reading a prompt "
                f"{facts['prefill_seconds_ratio']['median']:.3f}, equal answers {facts['equal_answers']:.2f}"
            )
    if args.json:
        names = {"target": Path(args.target).name, "drafter": Path(args.drafter).name}
        record = {"environment": environment(), "commits": commits, "settings": {**settings, **names}}
        write_json(args.json, {**record, "methods": compared(blocks)}, indent=1)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(work(json.loads(sys.argv[2]))))
    else:
        sys.exit(main())
