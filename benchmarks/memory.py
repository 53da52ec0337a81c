"""What a memory is worth: workloads that repeat themselves, answered by the head alone, with lookup, with memory.

    git worktree add --detach ../before fb4a028
    python -m benchmarks.memory --before ../before

Every method decodes all workloads in a process of its own, one answer after the other, without seeds. A method is
``NAME=DRAFTER`` or, in the checkout given by ``--before``, ``NAME=DRAFTER@before``. A memory learns from answer to
answer of a workload and forgets before the next one. The workloads:

=========  =============================================================================================================
chat       MT-bench, both turns; the second prompt holds the method's own first answer
rag        questions with retrieved passages
summaries  articles to summarise
replay     the prompts of these three again; the memory keeps what it has learned from them
samples    eight answers at temperature 0.7 to each of a few GSM8K problems, by a target tuned on such problems
edits      code of this repository's own history and a request that changes a few lines
forced     the same, but the target is made to answer as the commit did, whatever its own choice would be
json       facts of articles in JSON of one schema, which the answers are held to
=========  =============================================================================================================

Each result is recorded with a ceiling of copying without a head: the tokens per forward of :class:`Oracle`.

The built-in model hardly follows a request to edit, so ``edits`` shows its own answers, and ``forced`` what a target
that edits rightly would gain. A head is trained for its target's own answers and drafts worse there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
METHODS = "head=shipped,lookup=shipped+lookup,memory=shipped+memory:keep,memory alone=memory:keep"
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TARGET = "smollm2-135m"
TARGETS = {"samples": "smollm2-135m-maths"}  # where TARGET answers the other workloads
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "people": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 3},
        "place": {"type": "string", "maxLength": 30},
        "topic": {"enum": ["politics", "sport", "crime", "science", "business", "other"]},
    },
    "required": ["title", "people", "place", "topic"],
    "additionalProperties": False,
}
EDIT = "Here is a piece of code:\n```python\n{old}```\nReplace these lines:\n```python\n{gone}```\nwith these:\n```python\n{come}```\nWrite the whole piece."  # noqa: E501


def build_parser(module: str = "benchmarks.memory", text: str | None = __doc__) -> argparse.ArgumentParser:
    """Its options."""
    from benchmarks.recorded import PROMPTS, parser_of

    return parser_of(
        module, text, methods=(METHODS, "comma-separated"),
        before=(None, "a checkout from before the drafter memory, for the old lookup"), target=TARGET,
        workloads=("chat,rag,summaries,replay,samples,edits,forced,json", "comma-separated"), prompts=PROMPTS,
        problems=(ROOT / "data" / "gsm8k_test_dev.jsonl", "file of word problems"),
        each=(8, "prompts of chat, rag and summaries"), sampled=(8, "problems with eight samples each"),
        edits=(10, "edits"), texts=(40, "articles that become JSON"), max_new_tokens=96,
        tree=("auto", "DEPTH,WIDTH,NODES, auto, which reads the clock, or none, for drafters without a model"),
        threads=os.cpu_count() or 1, json=ROOT / "benchmarks" / "results" / "memory.json",
    )  # fmt: skip


# workloads ------------------------------------------------------------------------------------------------------------


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Questions in order: {"workload", "turns", and what differs from a greedy answer}."""
    from benchmarks.recorded import spread
    from fsd_core.text.rows import read_jsonl

    rows = [row for _, row in read_jsonl(args.prompts)]
    kinds = {"chat": CHAT, "rag": ("rag",), "summaries": ("summarization",)}
    questions = [
        {"workload": name, "turns": row["turns"]}
        for name, categories in kinds.items()
        for row in spread([row for row in rows if row["category"] in categories], args.each)
    ]
    articles = spread([row["turns"][0] for row in rows if row["category"] in ("summarization", "rag")], args.texts)
    edits = edits_of(ROOT, args.edits) if {"edits", "forced"} & set(args.workloads.split(",")) else []
    for name in args.workloads.split(","):
        if name in kinds:
            yield from (row for row in questions if row["workload"] == name)
        elif name == "replay":
            yield from ({**row, "workload": name} for row in questions)
        elif name == "samples":
            for row in spread([row for _, row in read_jsonl(args.problems)], args.sampled):
                yield from [{"workload": name, "turns": [row["question"]], "temperature": 0.7}] * 8
        elif name in ("edits", "forced"):
            yield from (
                {"workload": name, "turns": [request], "new": 320, **({"forced": answer} if name == "forced" else {})}
                for request, answer in edits
            )
        elif name == "json":
            for text in articles:
                request = f"{text[-900:]}\n\nFill in title, people, place and topic of this text as JSON."
                yield {"workload": name, "turns": [request], "schema": SCHEMA}
        else:
            raise ValueError(f"no workload {name!r}.")


def edits_of(repository: Path, count: int) -> list[tuple[str, str]]:
    """(request, answer) of commits that replaced a few lines of one place in a Python file, the latest first."""
    from benchmarks.recorded import spread

    git = ["git", "-C", str(repository)]
    log = [*git, "log", "--no-merges", "--format=%x00", "-p", "-U14", "-n", "400", "fb4a028", "--", "*.py"]
    patches = subprocess.run(log, capture_output=True, text=True, check=True).stdout
    edits = []
    for hunk in re.split(r"^(?:\0|diff |@@ .*$)", patches, flags=re.MULTILINE):
        lines = [line for line in hunk.split("\n") if line[:1] in (" ", "+", "-")]
        removed, added = ([line[1:] for line in lines if line[0] == sign] for sign in "-+")
        signs = "".join(line[0] for line in lines)
        if 30 <= len(lines) <= 44 and re.fullmatch(r" +-{1,5}\+{1,6} +", signs):
            old, new = ([line[1:] for line in lines if line[0] in f" {sign}"] for sign in "-+")
            text = {
                name: "".join(f"{line}\n" for line in part)
                for name, part in zip(("old", "gone", "come"), (old, removed, added))
            }
            edits.append((EDIT.format(**text), "```python\n" + "".join(f"{line}\n" for line in new) + "```"))
    return spread(edits, count)


# the process that decodes ---------------------------------------------------------------------------------------------


def answer_all(words: Sequence[str]) -> None:
    """Be the process of a method: ``DRAFTER TARGET TREE THREADS TOKENS``, rows on standard input, lines on standard
    output."""
    drafter, target, tree, threads, tokens = words
    import torch

    from fsd_infer import FuzzyDecoder, TreeShape

    torch.set_num_threads(int(threads))
    shape = tree if tree == "auto" else None if tree == "none" else TreeShape(*map(int, tree.split(",")))
    decoders: dict[str, FuzzyDecoder] = {}
    rows, before, oracle = [json.loads(line) for line in sys.stdin], "", Oracle()
    for number, row in enumerate(rows):
        name = TARGETS.get(row["workload"], target) if target == TARGET else target
        if name not in decoders:
            decoders[name] = FuzzyDecoder.from_pretrained(name, drafter, device="cpu", tree=shape)
            decoders[name].generate("Say a word.", max_new_tokens=8, do_sample=False)
        decoder = decoders[name]
        if row["workload"] not in (before, "replay"):
            forget(decoder.drafter)
            oracle = Oracle()
        before = row["workload"]
        torch.manual_seed(number)
        for prompt, out, seconds in turns(decoder, row, int(tokens)):
            stats = out.stats
            facts = {"tokens": stats.new_tokens, "forwards": stats.target_forwards, "seconds": seconds}
            facts |= {"prefill": stats.prefill_seconds, "draft": stats.phases.get("draft", 0.0)}
            facts["oracle_forwards"] = oracle.forwards(prompt, out.sequences[0])
            print(json.dumps({"workload": row["workload"], "row": number, **facts}), flush=True)


def forget(drafter: Any) -> None:
    """Also what a drafter keeps from other benchmarks."""
    for part in drafter.parts:
        forget(part)
    if hasattr(drafter, "stores"):
        drafter.stores = {}
    drafter.forget()


def turns(decoder: Any, row: dict[str, Any], tokens: int) -> Iterator[tuple[list[int], Any, float]]:
    """(prompt, answer, seconds) of each turn."""
    sampling = {"do_sample": True, "temperature": row["temperature"]} if "temperature" in row else {"do_sample": False}
    messages: list[dict[str, str]] = []
    for text in row["turns"]:
        messages.append({"role": "user", "content": text})
        ids, options = decoder.encode(messages), dict(sampling)
        if "schema" in row:
            options["guide"] = {"json": row["schema"]}
        if "forced" in row:
            options["logits_processor"] = [forced(decoder, ids, row["forced"])]
        start = time.perf_counter()
        generation = decoder.generate([ids], max_new_tokens=row.get("new", tokens), **options)
        yield ids, generation, time.perf_counter() - start
        messages.append({"role": "assistant", "content": generation.texts[0]})


def forced(decoder: Any, prompt: list[int], answer: str) -> Callable[[Any, Any], Any]:
    """A processor that leaves one token at each place: the answer's, then the end of the text."""
    tokenizer = decoder.tokenizer
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def process(text: Any, scores: Any) -> Any:
        token = ids[min(text.shape[1] - len(prompt), len(ids) - 1)]
        score = scores[:, token].clone()
        scores = scores.new_full(scores.shape, float("-inf"))
        scores[:, token] = score
        return scores

    return process


class Oracle:
    """A drafter without a head that knows the answer: it drafts each token that followed the longest match before.

    It reads the text and the earlier texts of the workload, matches up to eight tokens, and has nodes for all drafts.
    """

    longest = 8

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], set[int]] = {}

    def forwards(self, prompt: list[int], answer: list[int]) -> int:
        """Return the target forwards of an answer after its first token, and remember its text."""
        text, position, read, count = [*prompt, *answer], len(prompt) + 1, 1, 0
        while position < len(text):
            self._read(text, read, position)
            read, count = position, count + 1
            while position < len(text) and text[position] in self._followers(text, position):
                position += 1
            position += 1
        self._read(text, read, len(text))
        return count

    def _read(self, text: list[int], start: int, end: int) -> None:
        for index in range(start, end):
            for size in range(1, min(self.longest, index) + 1):
                self.after.setdefault(tuple(text[index - size : index]), set()).add(text[index])

    def _followers(self, text: list[int], position: int) -> set[int]:
        contexts = (tuple(text[max(position - size, 0) : position]) for size in range(self.longest, 0, -1))
        return next((self.after[context] for context in contexts if context in self.after), set())


# the record -----------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """{method: [answers]}: a process for each group of workloads and method, in turns. A killed run goes on with the
    one that it was at."""
    from benchmarks.recorded import Finished

    groups: dict[str, str] = {}
    for row in rows_of(args):
        name = "prompts" if row["workload"] in ("chat", "rag", "summaries", "replay") else row["workload"]
        groups[name] = groups.get(name, "") + json.dumps(row) + "\n"
    done = Finished(args.json)
    answers: dict[str, list[Any]] = {}
    for (group, rows), text in product(groups.items(), args.methods.split(",")):
        name, _, drafter = text.partition("=")
        words = [drafter.partition("@")[0], args.target, args.tree, str(args.threads), str(args.max_new_tokens)]
        digest = hashlib.sha256(" ".join([rows, *words]).encode()).hexdigest()
        key = f"{name} {digest}"
        if key not in done:
            print(f"[{group}: {name}]", file=sys.stderr, flush=True)
            checkout = args.before if drafter.endswith("@before") else ROOT
            if checkout is None:
                raise SystemExit(f"memory: {text} needs --before CHECKOUT.")
            command = [sys.executable, str(Path(__file__).resolve()), "--answer", *words]
            environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
            process = subprocess.run(
                command, input=rows, stdout=subprocess.PIPE, text=True, env=environment, check=True
            )
            done[key] = [json.loads(line) for line in process.stdout.splitlines()]
        answers.setdefault(name, []).extend(done[key])
    return answers


def summary(answers: dict[str, list[dict[str, Any]]], baseline: str) -> dict[str, Any]:
    """By workload and method: tokens per forward and per second, and 95 % intervals of the ratios to the baseline's."""
    from fsd_bench.intervals import ratio_interval

    def pairs(method: str, workload: str, over: Callable[[Any], float], under: Callable[[Any], float]) -> list[Any]:
        return [(over(a), under(a)) for a in answers[method] if a["workload"] == workload]

    measures: dict[str, tuple[Callable[[Any], float], Callable[[Any], float]]] = {
        "tau": (lambda a: a["tokens"] - 1, lambda a: a["forwards"]),
        "tokens_per_second": (lambda a: a["tokens"], lambda a: a["seconds"]),
        "decode_tokens_per_second": (lambda a: a["tokens"] - 1, lambda a: a["seconds"] - a["prefill"]),
    }
    workloads: dict[str, Any] = {}
    for workload in dict.fromkeys(a["workload"] for a in answers[baseline]):
        workloads[workload] = {}
        for method in answers:
            cell: dict[str, Any] = {"answers": len(pairs(method, workload, *measures["tau"]))}
            for name, (over, under) in measures.items():
                ours, theirs = (pairs(which, workload, over, under) for which in (method, baseline))
                cell[name] = sum(x for x, _ in ours) / sum(y for _, y in ours)
                cell[f"{name}_ratio"] = ratio_interval(ours, theirs)
            copied = pairs(method, workload, measures["tau"][0], lambda a: a.get("oracle_forwards", 0))
            if forwards := sum(y for _, y in copied):
                cell["oracle_tau"] = sum(x for x, _ in copied) / forwards
            workloads[workload][method] = cell
    return workloads


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    from benchmarks.recorded import record_main, settings_of
    from benchmarks.results_page import memory

    def run(args: argparse.Namespace) -> dict[str, Any]:
        answers = measure(args)
        baseline = "lookup" if "lookup" in answers else next(iter(answers))
        settings = {**settings_of(args), "prompts": args.prompts.name, "problems": args.problems.name}
        settings.pop("before", None)
        record = {"settings": settings, "baseline": baseline}
        record |= {"workloads": summary(answers, baseline), "answers": answers}
        return record

    return record_main("benchmarks.memory", build_parser(), run, memory, argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer_all(sys.argv[2:])
    else:
        sys.exit(main())
