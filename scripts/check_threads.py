"""Eight threads ask one decoder at once, for a minute; every answer is compared with the one given alone.

The cases are all combinations of rules, drafters and temperatures, with and without a streamer. Each thread draws
cases at random until the time is up. Exit status 1 where an answer differs or a call raises.

Run: python scripts/check_threads.py [--target NAME_OR_DIRECTORY] [--threads 8] [--seconds 60] [--json RECORD]
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TextIteratorStreamer

from fsd_bench.environment import environment
from fsd_infer import Drafter, FuzzyDecoder, parse_rule
from fsd_infer.cli.options import positive
from fsd_infer.cli.run import Parser, run
from fsd_infer.errors import FsdError
from fsd_infer.files import write_json

PROMPTS = [
    "Name three colours.",
    "Count from one to ten in words.",
    "What is the capital of France? Answer in one word.",
    "Repeat after me: the cat sat on the mat, the cat sat on the mat.",
]
RULES = ["exact", "fuzzy:js:0.3", "fuzzy:js:0.3:budget=2", "fuzzy-strict:tv:0.2", "random:0.3", "draft-only"]
DRAFTERS = ["none", "shipped", "lookup", "shipped+lookup"]


@dataclass(frozen=True)
class Case:
    """One request, and the name of its drafter."""

    prompt: Any
    rule: str
    drafter: str
    temperature: float
    seed: int
    max_new_tokens: int


def all_cases(
    prompts: Sequence[Any], rules: Sequence[str], drafters: Sequence[str], max_new_tokens: int = 24
) -> list[Case]:
    """Every combination; the seed is the case's number."""
    parts = [
        (prompt, rule, drafter, temperature)
        for prompt in prompts
        for rule in rules
        for drafter in drafters
        for temperature in (0.0, 0.9)
    ]
    return [Case(*part, seed, max_new_tokens) for seed, part in enumerate(parts)]


def answer(decoder: FuzzyDecoder, drafters: dict[str, Drafter], case: Case, stream: bool) -> tuple[list[int], str]:
    """Tokens and text; the text is the streamed one with ``stream``."""
    streamer: Any = None
    if stream:
        streamer = TextIteratorStreamer(decoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling: dict[str, Any] = {"temperature": case.temperature, "do_sample": case.temperature > 0}
    generation = decoder.generate(
        case.prompt,
        parse_rule(case.rule),
        drafter=drafters[case.drafter],
        seed=case.seed,
        streamer=streamer,
        max_new_tokens=case.max_new_tokens,
        **sampling,
    )
    return generation.sequences[0], "".join(streamer) if stream else generation.texts[0]


def compare(
    decoder: FuzzyDecoder, drafters: dict[str, Drafter], cases: Sequence[Case], threads: int, seconds: float
) -> dict[str, Any]:
    """Answer every case alone, then many at once: {"cases", "answers", "streamed", "different", "errors"}.

    Each thread answers at least four cases; without a tokenizer nothing is streamed.
    """
    alone = [answer(decoder, drafters, case, False) for case in cases]
    counts: Counter[str] = Counter()
    errors: list[str] = []
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        draw = random.Random(number)
        rounds: Iterator[int] = iter(range(4))
        while next(rounds, None) is not None or time.monotonic() < end:
            index = draw.randrange(len(cases))
            stream = decoder.tokenizer is not None and draw.random() < 0.5
            try:
                same = answer(decoder, drafters, cases[index], stream) == alone[index]
            except Exception as error:
                with lock:
                    errors.append(f"{cases[index]}: {type(error).__name__}: {error}")
                continue
            with lock:
                counts.update({"answers": 1, "streamed": stream, "different": not same})

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"cases": len(cases), **{key: counts[key] for key in ("answers", "streamed", "different")}, "errors": errors}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module."""
    parser = Parser(prog="check_threads.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="(%(default)s)")
    parser.add_argument("--threads", type=positive, default=8, help="that ask at once (%(default)s)")
    parser.add_argument("--seconds", type=positive, default=60, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write what was counted")
    args = parser.parse_args(argv)
    return run("check_threads.py", lambda: _check(args))


def _check(args: argparse.Namespace) -> int:
    decoder = FuzzyDecoder.from_pretrained(args.target, "none")
    drafters = {name: decoder.load_drafter(name) for name in DRAFTERS}
    cases = all_cases(PROMPTS, RULES, DRAFTERS)
    print(f"{len(cases)} cases alone, then {args.threads} threads for {args.seconds} s ...", file=sys.stderr)
    counts = compare(decoder, drafters, cases, args.threads, args.seconds)
    counts |= {"threads": args.threads, "seconds": args.seconds, "target": args.target}
    print(
        f"{counts['answers']} answers ({counts['streamed']} streamed) of {counts['cases']} cases: "
        f"{counts['different']} different, {len(counts['errors'])} errors"
    )
    if args.json:
        write_json(args.json, counts | {"environment": environment()}, indent=1)
    if counts["errors"]:
        raise FsdError(counts["errors"][0])
    return int(bool(counts["different"]))


if __name__ == "__main__":
    sys.exit(main())
