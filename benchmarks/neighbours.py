"""Measure decoding beside processes that keep cores busy, with and without our kernels.

    git worktree add --detach ../before d68b4f5
    python -m benchmarks.neighbours --before ../before --json benchmarks/results/neighbours.json

Each checkout decodes in two processes of its own, with our kernels and without (FSD_KERNELS=0). They take turns, so
that one decodes at a time. The neighbours run beside every turn, one endless loop each. In a block of turns, all answer
the same two prompts of different categories, or as much of them as ``--seconds`` allow, after a short one that does not
count. A rate is new tokens per second after the prefill.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


def serve(checkout: str, target: str, prompts: str, threads: str) -> None:
    """Decode for the benchmark until standard input ends: a line with rule, block and seconds, then one with a rate."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    sys.path.insert(0, checkout)
    import torch

    from fsd_infer import FuzzyDecoder

    torch.set_num_threads(int(threads))
    decoder = FuzzyDecoder.from_pretrained(target, dtype=torch.bfloat16, device="cpu")
    drafters = {"plain": decoder.load_drafter("none")}
    texts = [json.loads(line)["turns"][0] for line in Path(prompts).read_text(encoding="utf-8").splitlines()]
    texts = [text for text in texts if len(text) < 500]  # a turn's seconds do not bound the prefill

    def rate(rule: str, block: int, seconds: float) -> float:
        decoder.generate(texts[0], drafter=drafters["plain"], max_new_tokens=16, do_sample=False)
        tokens, spent, end = 0, 0.0, time.monotonic() + seconds
        for number in range(2):
            generation = decoder.generate(
                texts[(17 * (2 * block + number)) % len(texts)], rule="exact" if rule == "plain" else rule,
                drafter=drafters.get(rule), max_new_tokens=48, do_sample=False,
                max_time=max(end - time.monotonic(), 0.001),
            )  # fmt: skip
            tokens += generation.stats.rows[0].new_tokens - 1
            spent += generation.stats.seconds - generation.stats.prefill_seconds
        return tokens / spent if spent else 0.0

    print(json.dumps({}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(rate(*json.loads(line))), file=out, flush=True)


class Decoder:
    """A process that decodes by a checkout, with our kernels or without."""

    def __init__(self, checkout: Path, kernels: bool, words: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--serve", str(checkout), *words]
        environment = {name: value for name, value in os.environ.items() if name != "FSD_KERNELS"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment if kernels else {**environment, "FSD_KERNELS": "0"},
        )  # fmt: skip
        self._read()

    def rate(self, rule: str, block: int, seconds: float) -> float:
        """Return new tokens per second of a turn."""
        assert self._process.stdin is not None
        print(json.dumps([rule, block, seconds]), file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> Any:
        from fsd_core.errors import FsdError

        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise FsdError("a decoding process ended: its message is above.")
        return json.loads(line)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run ``count`` endless loops, which end with this process."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(0.5 if loops else 0.0)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of each checkout, kernels or none, rule and number of neighbours, turn by turn.

    Raises FsdError if a process ends.
    """
    checkouts = {"after": ROOT} if args.before is None else {"before": args.before.resolve(), "after": ROOT}
    words = [args.target, str(args.prompts), str(args.threads)]
    rates: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        decoders = {}
        for name, checkout in checkouts.items():
            for kernels in (True,) if args.kernels_only else (True, False):
                decoder = decoders[name, kernels] = Decoder(checkout, kernels, words)
                stack.callback(decoder.close)
        for decoder in decoders.values():  # compile, learn costs
            decoder.rate("exact", -1, args.seconds)
        for turn in range(args.blocks):
            for count in range(args.neighbours + 1):
                order = list(decoders.items())[:: -1 if turn % 2 else 1]
                with busy(count):
                    for (name, kernels), decoder in order:
                        for rule in args.rules.split(","):
                            case = f"{name} {rule}{'' if kernels else ' without kernels'}"
                            case_rates = rates.setdefault(case, {}).setdefault(str(count), [])
                            case_rates.append(round(decoder.rate(rule, turn, args.seconds), 2))
    return {"tokens_per_second": rates}


def report(record: dict[str, Any]) -> str:
    """Return the table: medians, and in brackets what share of the speed alone is left."""
    from statistics import median

    from fsd_core.tables import table

    rows = []
    for case, by_count in record["tokens_per_second"].items():
        rates = [median(turns) for turns in by_count.values()]
        beside = [f"{rate:.1f} ({rate / rates[0]:.2f})" for rate in rates[1:]]
        rows.append([case, f"{rates[0]:.1f}", *beside])
    counts = [f"beside {count}" for count in range(1, len(rows[0]) - 1)]
    return table(["tokens per second", "alone", *counts], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the record."""
    from benchmarks.recorded import BUILT_IN, PROMPTS, parser_of, record_main

    parser = parser_of(
        "benchmarks.neighbours", __doc__, target=BUILT_IN, rules="plain,exact", prompts=PROMPTS, threads=2,
        neighbours=(2, "most busy processes beside"), blocks=(2, "turns of each case"),
        seconds=(5.0, "most seconds of a turn"), json=None,
        kernels_only=(False, "leave out FSD_KERNELS=0"), before=(None, "an earlier checkout, to compare with"),
    )  # fmt: skip
    return record_main("benchmarks.neighbours", parser, measure, report, argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
