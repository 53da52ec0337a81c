"""How much of the answers is copied from the prompt, by kind of prompt, before a commit and now.

    git worktree add --detach ../before 2541dda
    python -m benchmarks.echo ../before benchmarks/results/echo.json

Temperature 0. Each checkout decodes in a process of its own; 4-grams are counted here, of the token ids, so that both
are counted alike. Prints a Markdown table: copied / repeated 4-grams and tokens per forward.
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

from benchmarks.compare_checkouts import commit
from benchmarks.workplace import shown_command

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "summarization": "summaries", "translation": "translations", "rag": "answers from passages", "qa": "questions",
    "math_reasoning": "worked sums",
}  # fmt: skip
BOLD, EXACT, HEAD = "10x2x11x0.2", "6x4x9x0.5", "shipped"
METHODS = {  # name: (in the earlier checkout, rule, drafter, tree)
    "exact": (False, "exact", "shipped+lookup", EXACT),
    "before: tilted:2:no_repeat=4": (True, "tilted:2:no_repeat=4", "shipped+lookup", BOLD),
    "before: tilted:1:no_repeat=4": (True, "tilted:1:no_repeat=4", "shipped+lookup", BOLD),
    "before: tilted:1:no_repeat=4, head alone": (True, "tilted:1:no_repeat=4", HEAD, BOLD),
    "tilted": (False, "tilted", "shipped+lookup", BOLD),
    "tilted, head alone": (False, "tilted", HEAD, BOLD),
}


def decode_here(path: Path) -> None:
    """Be the process of one checkout, which Python finds first: read a job, write the answers into its place."""
    import torch
    from tqdm import tqdm

    from fsd_infer import FuzzyDecoder, TreeShape
    from fsd_infer.chat.encoding import encode_chat

    job = json.loads(path.read_text())
    torch.set_num_threads(job["threads"])
    decoder = FuzzyDecoder.from_pretrained(job["target"], tree=TreeShape.parse(EXACT))
    prompts = [encode_chat(decoder.tokenizer, [{"role": "user", "content": text}]) for text in job["prompts"]]
    made: dict[str, Any] = {}
    for name, (rule, drafter, tree) in job["methods"].items():
        drafts = decoder.load_drafter(drafter, TreeShape.parse(tree))
        made[name] = []
        for prompt in tqdm(prompts, desc=name):
            found = decoder.generate([prompt], rule, drafter=drafts, max_new_tokens=job["tokens"], do_sample=False)
            forwards = found.stats.rows[0].target_forwards
            made[name].append({"prompt": prompt, "tokens": found.sequences[0], "forwards": forwards})
    path.write_text(json.dumps(made))


def measure(before: Path, limit: int, tokens: int, target: str) -> dict[str, Any]:
    """By method and kind: prompts, copied and repeated 4-grams (means), tokens per forward, answers mostly copied."""
    from fsd_infer.engine.ngrams import copied_ngrams, repeated_ngrams

    kinds: dict[str, list[str]] = {}
    for line in (ROOT / "data" / "spec_bench_dev.jsonl").read_text().splitlines():
        row = json.loads(line)
        kinds.setdefault(KINDS.get(row["category"], "chat"), []).append(row["turns"][0])
    asked = [(kind, text) for kind, texts in kinds.items() for text in texts[:limit]]
    found: dict[str, Any] = {}
    for earlier, checkout in ((False, ROOT), (True, before.resolve())):
        methods = {name: rest for name, (when, *rest) in METHODS.items() if when == earlier}
        job = ROOT / "runs" / f"echo-{earlier}.json"
        job.parent.mkdir(exist_ok=True)
        texts = [text for _, text in asked]
        threads = os.cpu_count() or 1
        job.write_text(json.dumps(dict(methods=methods, prompts=texts, tokens=tokens, target=target, threads=threads)))
        command = [sys.executable, str(Path(__file__).resolve()), "--job", str(job)]
        subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)}, check=True)
        found.update(json.loads(job.read_text()))
        job.unlink()
    table: dict[str, Any] = {}
    for name in METHODS:
        for kind in kinds:
            answers = [one for (of, _), one in zip(asked, found[name], strict=True) if of == kind]
            copied = [copied_ngrams(one["prompt"], one["tokens"]) or 0.0 for one in answers]
            repeated = [repeated_ngrams(one["tokens"]) or 0.0 for one in answers]
            forwards = sum(one["forwards"] for one in answers)
            table.setdefault(name, {})[kind] = {
                "prompts": len(answers),
                "copied_4grams": sum(copied) / len(answers),
                "repeated_4grams": sum(repeated) / len(answers),
                "tau": sum(len(one["tokens"]) - 1 for one in answers) / forwards if forwards else None,
                "mostly_copied": sum(share > 0.5 for share in copied),
            }
    return table


def markdown(table: dict[str, Any]) -> str:
    """Kinds down, methods across: copied / repeated / tokens per forward."""
    lines = ["| | " + " | ".join(f"`{name}`" for name in table) + " |", "|---" * (len(table) + 1) + "|"]
    for kind in next(iter(table.values())):
        cells = [table[name][kind] for name in table]
        shown = [f"{one['copied_4grams']:.2f} / {one['repeated_4grams']:.2f} / {one['tau']:.1f}" for one in cells]
        lines.append(f"| {kind} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.echo", description=__doc__.split("\n\n")[0])
    parser.add_argument("before", type=Path, help="the earlier checkout")
    parser.add_argument("record", type=Path, help="where the record goes")
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each kind (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    args = parser.parse_args(argv)
    from fsd_bench.environment import environment
    from fsd_bench.record import write_record

    table = measure(args.before, args.limit, args.max_new_tokens, args.target)
    facts = {"environment": environment(shown_command("benchmarks.echo", argv)), "before": commit(args.before)}
    write_record(args.record, {**facts, "methods": table})
    print(markdown(table))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        decode_here(Path(sys.argv[2]))
    else:
        main()
