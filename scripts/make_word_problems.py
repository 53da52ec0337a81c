"""Makes word problems with worked answers: the held-out sets that ship, and the data that a target is fine-tuned on.

    python scripts/make_word_problems.py heldout --output data/word-problems.jsonl.gz
    python scripts/make_word_problems.py train --count 300000 --gsm8k gsm8k_train.jsonl.gz \\
        --general data/smollm2-135m-answers*.jsonl.gz --tokenizer smollm2-135m --output runs/maths/train.jsonl

Half of the held-out problems use wordings that training problems never have (``unseen``), the other half are new texts
in known wordings. No training problem has a text of the held-out file. The same arguments give the same files, on any
number of processes. No test file of any benchmark is read.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from word_problems import make_problem

from fsd_infer.chat.encoding import encode_conversation, read_prompts
from fsd_infer.chat.rows import read_jsonl
from fsd_infer.errors import FsdError

HELD_OUT = Path(__file__).parent.parent / "data" / "word-problems.jsonl.gz"
STEPS = {1: 0.2, 2: 0.28, 3: 0.27, 4: 0.15, 5: 0.1}  # shares of training problems
CHUNK = 2000
Row = dict[str, Any]


def problem_row(rng: random.Random, steps: int, unseen: bool = False, held_out: bool = False) -> Row:
    """One problem: ``question``, ``answer`` (the work and ``#### N``), ``steps``, ``kind``, ``unseen``."""
    made = make_problem(rng, steps, unseen, held_out)
    source = f"word-problems/{steps}"
    return {
        "question": made.question,
        "answer": made.solution,
        "steps": steps,
        "kind": made.kind,
        "unseen": made.unseen,
        "source": source,
    }


def held_out(seed: int, counts: dict[int, int]) -> list[Row]:
    """Problems of each number of steps, no text twice; every other one in unseen wordings."""
    rows: list[Row] = []
    for steps, count in counts.items():
        rng = random.Random(f"held out {seed} {steps}")
        known: set[str] = set()
        while len(known) < count:
            row = problem_row(rng, steps, unseen=len(known) % 2 == 1, held_out=True)
            if row["question"] not in known:
                known.add(row["question"])
                rows.append(row)
    return rows


def chunk(number: int, seed: int) -> list[Row]:
    """Training problems number ``CHUNK * number`` and on."""
    rng = random.Random(f"training {seed} {number}")
    return [problem_row(rng, rng.choices(list(STEPS), list(STEPS.values()))[0]) for _ in range(CHUNK)]


def gsm8k_answer(text: str) -> str:
    """GSM8K's answer without calculator annotations, with equations spaced as in the problems made here."""
    lines = []
    for line in re.sub(r"<<[^>]*>>", "", text).replace("\r", "").split("\n"):
        if "=" in line:
            line = re.sub(r"(?<=\d) ?[xX×] ?(?=[$\d(])", " * ", line)
            line = re.sub(r"(?<=[\d)%]) ?([+\-*/=]) ?(?=[$\d(.])", r" \1 ", line)
        lines.append(re.sub(r"  +", " ", line).strip())
    return "\n".join(line for line in lines if line)


def gsm8k_rows(path: Path) -> list[Row]:
    """GSM8K's training half."""
    return [
        {
            "question": str(row.row["question"]).strip(),
            "answer": gsm8k_answer(str(row.row["answer"])),
            "source": "gsm8k_train",
        }
        for row in read_prompts(path)
    ]


def general_rows(paths: Sequence[Path]) -> list[Row]:
    """The target's own answers to everything but maths, as their token ids."""
    kept = ("id", "prompt_ids", "response_ids", "source")
    return [
        {name: row[name] for name in kept}
        for path in paths
        for _, row in read_jsonl(path)
        if not str(row["source"]).startswith("gsm8k")
    ]


def encoded(rows: list[Row], tokenizer: str | None) -> list[str]:
    """Lines of the training file: with token ids if a tokenizer is named, else conversations."""
    lines = []
    for row in rows:
        if "question" in row:
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            if tokenizer is None:
                row = {"messages": messages, "source": row["source"]}
            else:
                ((ids, mask),) = encode_conversation(_tokenizer(tokenizer), messages)
                start = mask.index(1)
                row = {"prompt_ids": ids[:start], "response_ids": ids[start:], "source": row["source"]}
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    return lines


_TOKENIZERS: dict[str, Any] = {}


def _tokenizer(name: str) -> Any:
    if name not in _TOKENIZERS:
        from transformers import AutoTokenizer

        from fsd_infer.targets.loading import resolve_target

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _TOKENIZERS[name] = AutoTokenizer.from_pretrained(name if Path(name).is_dir() else resolve_target(name))
    return _TOKENIZERS[name]


def training_chunk(number: int, seed: int, tokenizer: str | None, without: frozenset[str]) -> list[tuple[int, str]]:
    """(hash of the text, line) per problem of a chunk."""
    rows = [row for row in chunk(number, seed) if row["question"] not in without]
    return [(hash(row["question"]), line) for row, line in zip(rows, encoded(rows, tokenizer))]


def training(args: argparse.Namespace) -> Iterator[str]:
    """Lines of the training file: the problems, then GSM8K, then general answers."""
    without = frozenset(row["question"] for _, row in read_jsonl(args.without)) if args.without else frozenset()
    make = partial(training_chunk, seed=args.seed, tokenizer=args.tokenizer, without=without)
    known: set[int] = set()
    with get_context("fork").Pool(args.workers) as pool:
        for made in pool.imap(make, range(2 * args.count // CHUNK + 2 if args.count else 0)):
            for key, line in made:
                if key not in known:
                    known.add(key)
                    yield line
                    if len(known) == args.count:
                        pool.terminate()
                        break
            print(f"\r{len(known)} problems", end="", file=sys.stderr, flush=True)
            if len(known) >= args.count:
                break
    print(file=sys.stderr)
    for _ in range(args.gsm8k_repeat if args.gsm8k else 0):
        yield from encoded(gsm8k_rows(args.gsm8k), args.tokenizer)
    general = general_rows(args.general)
    random.Random(args.seed).shuffle(general)
    yield from encoded(general[: args.general_count], args.tokenizer)


def write(path: Path, lines: Iterator[str]) -> int:
    """Write lines, gzip-compressed if the name says so, by one rename; their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".partial")
    count = 0
    with open(draft, "wb") as raw:
        # without name and time: the same rows give the same file
        file: Any = gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw
        for line in lines:
            file.write(line.encode("utf-8"))
            count += 1
        if file is not raw:
            file.close()
    os.replace(draft, path)
    return count


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=0)
    commands = p.add_subparsers(dest="command", required=True)
    held = commands.add_parser("heldout", help="the held-out problems")
    held.add_argument("--output", type=Path, default=HELD_OUT)
    held.add_argument("--count", type=int, default=1000, help="of three steps (%(default)s)")
    held.add_argument("--others", type=int, default=300, help="of each other number of steps (%(default)s)")
    train = commands.add_parser("train", help="the training file")
    train.add_argument("--output", type=Path, required=True)
    train.add_argument("--count", type=int, default=300_000, help="problems to make (%(default)s)")
    train.add_argument("--without", type=Path, default=HELD_OUT, help="held-out problems to leave out")
    train.add_argument("--gsm8k", type=Path, help="GSM8K's training half (.jsonl.gz)")
    train.add_argument("--gsm8k-repeat", type=int, default=3, help="how often each of its rows is in the file")
    train.add_argument("--general", type=Path, nargs="*", default=[], help="the target's own answers, to keep them")
    train.add_argument("--general-count", type=int, help="at most so many of these")
    train.add_argument("--tokenizer", help="write token ids: a target's name, or a directory with its tokenizer")
    train.add_argument("--workers", type=int, default=os.cpu_count())
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "heldout":
            counts = {steps: args.count if steps == 3 else args.others for steps in STEPS}
            rows = held_out(args.seed, counts)
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            print(f"{args.output}: {write(args.output, lines)} problems", dict(Counter(row["steps"] for row in rows)))
        else:
            print(f"{args.output}: {write(args.output, training(args))} rows")
    except FsdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
