"""Tokens per forward by the place in a chat at which an answer begins, up to some 4,000 tokens.

    python -m benchmarks.positions --json benchmarks/results/positions.json

The same questions are asked in chats of growing length: after no earlier turns, and after turns of the built-in
model's answers that would be 512, 1,024, 2,048 and 3,584 tokens as conversations of their own. Trees are fixed, so that
nothing follows the clock. Ratios are to answers without earlier turns, with intervals over questions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.recorded import BUILT_IN, PROMPTS, ROOT, parser_of, record_main, run_resumed, spread
from benchmarks.results_page import by_place
from fsd_bench.intervals import ratio_interval
from fsd_core.files import write_text
from fsd_core.text.rows import read_jsonl, read_rows
from fsd_infer.trees.shape import parse_tree

PLACES = (0, 512, 1024, 2048, 3584)
Rows = Iterator[Mapping[str, Any]]


def answered() -> Rows:
    """Yield the rows of data/smollm2-135m-answers.jsonl.gz."""
    return (row.values for row in read_rows(ROOT / "data" / "smollm2-135m-answers.jsonl.gz"))


def up_to(rows: Rows, tokens: int) -> Rows:
    """Yield rows until they hold so many tokens."""
    while tokens > 0 and (row := next(rows, None)) is not None:
        tokens -= len(row["prompt_ids"]) + len(row["response_ids"])
        yield row


def chat(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the turns of several rows as one conversation."""
    return [turn for row in rows for turn in (*row["messages"], {"role": "assistant", "content": row["response"]})]


def write_chats(file: Path, source: Path, limit: int) -> None:
    """Write ``limit`` questions, equally spread over ``source``, after earlier turns of each of :data:`PLACES`."""
    questions = [row["turns"][0] for _, row in read_jsonl(source)]
    rows, earlier = [], answered()
    for question in spread(questions, limit):
        for place in PLACES:
            turns = [*chat(list(up_to(earlier, place))), {"role": "user", "content": question}]
            rows.append({"category": str(place), "messages": turns})
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures by place."""
    with TemporaryDirectory() as directory:
        prompts = (args.work or Path(directory)) / "chats.jsonl"
        write_chats(prompts, args.prompts, args.limit)
        record = run_resumed(
            prompts, ["exact"], args.json and args.json.with_name(f"{args.json.stem}-run.json"), target=args.target,
            drafter=args.drafter, max_new_tokens=args.max_new_tokens, tree=parse_tree(args.tree), threads=args.threads,
        )  # fmt: skip
    pairs_at: dict[str, list[tuple[float, float]]] = {}  # tokens and forwards of answers, by place
    lengths: dict[str, list[int]] = {}
    for row in record["prompts"]:
        answer = row["methods"]["exact"][0]
        tokens, forwards = answer["tau"] * answer["target_forwards"], answer["target_forwards"]
        pairs_at.setdefault(row["category"], []).append((tokens, forwards))
        lengths.setdefault(row["category"], []).append(row["prompt_tokens"])
    first = pairs_at[str(PLACES[0])]
    return {
        "places": {
            place: {
                "prompt_tokens": [min(lengths[place]), max(lengths[place])],
                "tau": sum(tokens for tokens, _ in pairs) / sum(forwards for _, forwards in pairs),
                "ratio": ratio_interval(pairs, first),
            }
            for place, pairs in pairs_at.items()
        }
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of(
        "benchmarks.positions", __doc__, target=BUILT_IN, drafter="shipped", prompts=PROMPTS,
        limit=(20, "number of questions"), tree=("6,2,12", "depth, width and nodes"), max_new_tokens=64, threads=1,
        json=None, work=(None, "directory for the prompts; default: a temporary one"),
    )  # fmt: skip
    return record_main("benchmarks.positions", parser, measure, by_place, argv)


if __name__ == "__main__":
    sys.exit(main())
