"""What a memory costs: a corpus of ten million tokens, a store under ten thousand requests, a draft.

The corpus is the shipped answers, repeated with one token in twenty replaced until there are enough. First use is timed
in a process of its own, look-ups on the ends of answers that are not in the corpus as they stand.

Example: python -m benchmarks.memory_index
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

from benchmarks.recorded import ROOT, parser_of, record_main, settings_of
from fsd_core.text.rows import read_jsonl
from fsd_infer.drafters.corpus import SUFFIX, open_corpus
from fsd_infer.drafters.free import best_first
from fsd_infer.drafters.memory import TextMatcher
from fsd_infer.drafters.suffix_store import Store

VOCABULARY = 49152
DEPTH, NODES, MIN_ACCEPT_PROB = 24, 24, 0.02


def target() -> Any:
    """What a corpus needs to know of a target."""
    return SimpleNamespace(name="ids", vocab_size=VOCABULARY, fingerprint=lambda: {"vocabulary_sha256": "ids"})


def texts(seed: int) -> Iterator[list[int]]:
    """Prompts with their answers, again and again; with a seed other than 0, other tokens stand here and there."""
    draws = Random(seed)
    while True:
        for file in sorted((ROOT / "data").glob("smollm2-135m-answers*.jsonl.gz")):
            for _, row in read_jsonl(file):
                ids = [*row["prompt_ids"], *row["response_ids"]]
                yield ids if not seed else [draws.randrange(VOCABULARY) if draws.random() < 0.05 else i for i in ids]


def write_corpus(file: Path, tokens: int) -> None:
    count = 0
    with file.open("w", encoding="utf-8") as out:
        for ids in texts(1):
            out.write(json.dumps({"prompt_ids": ids}) + "\n")
            count += len(ids)
            if count >= tokens:
                return


def contexts(count: int) -> list[list[int]]:
    """Ends of texts within answers."""
    draws, source = Random(2), texts(3)
    return [ids[: draws.randrange(8, len(ids))] for ids, _ in zip(source, range(count))]


def first_use(file: Path) -> dict[str, float]:
    """Be the process that uses an index for the first time."""
    start = time.perf_counter()
    index = open_corpus(file, target())
    index.matches(list(range(40)), 12)
    seconds, ends, microseconds = time.perf_counter() - start, contexts(2000), []
    for end in ends:
        start = time.perf_counter()
        index.matches(end[-32:], 12)
        microseconds.append(1e6 * (time.perf_counter() - start))
    facts = {"first_use_seconds": seconds, "tokens": len(index), "cold_look_up_us": median(microseconds[:200])}
    microseconds.clear()
    for end in ends:
        start = time.perf_counter()
        index.matches(end[-32:], 12)
        microseconds.append(1e6 * (time.perf_counter() - start))
    return facts | {"look_up_us": median(microseconds), "look_up_us_p95": quantiles(microseconds, n=20)[-1]}


def corpus_figures(folder: Path, tokens: int) -> dict[str, Any]:
    """Seconds, bytes and look-ups of an index."""
    file = folder / "corpus.jsonl"
    if not file.exists():
        write_corpus(file, tokens)
    start = time.perf_counter()
    open_corpus(file, target())
    seconds = time.perf_counter() - start
    command = [sys.executable, "-m", "benchmarks.memory_index", "--first-use", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    size = file.with_name(file.name + SUFFIX).stat().st_size
    return {"build_seconds": seconds, "index_bytes": size, **json.loads(process.stdout)}


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def store_figures(requests: int, mib: int) -> dict[str, Any]:
    """Return the bytes of a store after ``requests`` requests, and the milliseconds that remembering one takes."""
    store, milliseconds, before, peak = Store(mib << 20), [], resident(), 0
    for ids, _ in zip(texts(5), range(requests)):
        half = len(ids) // 2
        start = time.perf_counter()
        store.add([ids[:half], ids])
        milliseconds.append(1e3 * (time.perf_counter() - start))
        peak = max(peak, store.nbytes)
    return {
        "bound_bytes": mib << 20, "most_bytes": peak, "process_grew_by": resident() - before, "requests": requests,
        "texts": len(store.texts), "tokens": len(store), "add_ms": median(milliseconds),
        "add_ms_p95": quantiles(milliseconds, n=20)[-1],
    }  # fmt: skip


def draft_figures(mib: int) -> dict[str, float]:
    """Milliseconds of a draft, and microseconds of a token that the text grows by, alone and with a full store."""
    store = Store(mib << 20)
    for ids, _ in zip(texts(5), range(4000)):
        store.add([ids])
    figures: dict[str, float] = {}
    for name, stores in {"text": [], "text_and_store": [store]}.items():
        drafts, tokens = [], []
        for ids, _ in zip(texts(0), range(60)):
            matcher = TextMatcher(list(stores))
            for index, token in enumerate(ids):
                if index > 40 and index % 3 == 0:
                    start = time.perf_counter()
                    best_first(matcher, matcher.look_up(), matcher.tokens[-1], NODES, DEPTH, MIN_ACCEPT_PROB)
                    drafts.append(1e3 * (time.perf_counter() - start))
                start = time.perf_counter()
                matcher.append(token)
                tokens.append(1e6 * (time.perf_counter() - start))
        figures |= {f"{name}_draft_ms": median(drafts), f"{name}_draft_ms_p95": quantiles(drafts, n=20)[-1]}
        figures |= {f"{name}_token_us": median(tokens)}
    return figures


def report(record: dict[str, Any]) -> str:
    """Its numbers, a line each."""
    parts = ("corpus", "store", "draft")
    return "\n".join(f"{part} {name}: {value:,.4g}" for part in parts for name, value in record[part].items())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a corpus, of a store, and of drafts."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        corpus = corpus_figures(folder, args.tokens)
    settings = {name: value for name, value in settings_of(args).items() if name != "folder"}
    store, draft = store_figures(args.requests, args.store_mib), draft_figures(args.store_mib)
    return {"settings": settings, "corpus": corpus, "store": store, "draft": draft}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(
        "benchmarks.memory_index", __doc__, tokens=(10_000_000, "tokens of the corpus"),
        requests=(10_000, "requests that the store remembers"), store_mib=(16, "size of the store"),
        folder=(None, "folder of the corpus, which stays; default: a temporary one"),
        json=ROOT / "benchmarks" / "results" / "memory-index.json",
    )  # fmt: skip
    return record_main("benchmarks.memory_index", parser, measure, report, argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-use"]:
        print(json.dumps(first_use(Path(sys.argv[2]))))
    else:
        sys.exit(main())
