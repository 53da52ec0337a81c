"""What a prefix cache saves: the turns of a chat under one system prompt, read whole and from where they are new.

Two decoders of one target answer the same chats turn by turn, in turns; each keeps its own answers in the text.

Example: python -m benchmarks.prefixes
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.recorded import record_main, settings_of
from fsd_bench.environment import environment
from fsd_infer.chat.rows import read_jsonl
from fsd_infer.cli.report import number, table
from fsd_infer.decoder import FuzzyDecoder

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("writing", "humanities", "qa")
SYSTEM = "You answer for a public library. It opens at nine and closes at six, on Sundays at noon. " * 12


def build_parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "spec_bench_dev.jsonl")
    parser.add_argument("--chats", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each chat (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "prefixes.json")
    return parser


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each turn and decoder: seconds, tokens of the prompt and how many were known, the answer."""
    torch.set_num_threads(args.threads)
    short = [row["turns"][0] for _, row in read_jsonl(args.prompts) if row["category"] in KINDS]
    decoders = {
        "whole": FuzzyDecoder.from_pretrained(args.target),
        "kept": FuzzyDecoder.from_pretrained(args.target, prefix_cache_bytes=1 << 30),
    }
    for decoder in decoders.values():
        decoder.generate("Good morning.", max_new_tokens=4)  # what a process does once
    rows = []
    for chat in range(args.chats):
        texts = {name: [{"role": "system", "content": SYSTEM}] for name in decoders}
        for turn in range(args.turns):
            question = short[(chat * args.turns + turn) % len(short)]
            for name in sorted(decoders, reverse=(chat + turn) % 2 == 1):
                texts[name].append({"role": "user", "content": question})
                out = decoders[name].generate([texts[name]], max_new_tokens=args.max_new_tokens, do_sample=False)
                texts[name].append({"role": "assistant", "content": out.texts[0]})
                prompt = len(decoders[name].encode(texts[name][:-1]))
                rows.append(
                    {
                        "decoder": name, "turn": turn, "prompt_tokens": prompt,
                        "known_tokens": out.stats.known_tokens, "prefill_seconds": out.stats.prefill_seconds,
                        "seconds": out.stats.seconds, "answer": out.texts[0],
                    }
                )  # fmt: skip
    return rows


def run(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """The record of a command line. Raises FsdError."""
    rows = measure(args)
    turns = []
    for turn in range(args.turns):
        here = [row for row in rows if row["turn"] == turn]
        of = {name: [row for row in here if row["decoder"] == name] for name in ("whole", "kept")}
        pairs = list(zip(of["whole"], of["kept"], strict=True))
        turns.append(
            {
                "prompt_tokens": median(row["prompt_tokens"] for row in of["kept"]),
                "known_tokens": median(row["known_tokens"] for row in of["kept"]),
                **{f"prefill_{n}": median(row["prefill_seconds"] for row in found) for n, found in of.items()},
                "times_as_fast": median(whole["seconds"] / kept["seconds"] for whole, kept in pairs),
                "equal_answers": sum(whole["answer"] == kept["answer"] for whole, kept in pairs) / len(pairs),
            }
        )
    settings = settings_of(args) | {"prompts": args.prompts.name}
    del settings["json"]
    return {"turns": turns, "settings": settings, "environment": environment(command)}


def report(record: dict[str, Any]) -> str:
    """A line for each turn."""
    head = ["turn", "prompt", "known", "prefill, s", "with the cache", "times as fast", "equal answers"]
    rows = [
        [
            str(place), f"{turn['prompt_tokens']:.0f}", f"{turn['known_tokens']:.0f}",
            *(number(turn[name], 3) for name in ("prefill_whole", "prefill_kept")), number(turn["times_as_fast"]),
            number(turn["equal_answers"]),
        ]
        for place, turn in enumerate(record["turns"], 1)
    ]  # fmt: skip
    return table(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record, print its table."""
    return record_main("benchmarks.prefixes", build_parser(), run, report, argv)


if __name__ == "__main__":
    sys.exit(main())
