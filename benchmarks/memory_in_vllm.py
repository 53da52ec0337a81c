"""Answer the workloads of :mod:`benchmarks.memory` in vLLM, with its drafters of repeated text.

    python -m benchmarks.memory_in_vllm --vllm .venv-vllm/bin/python --json benchmarks/results/memory-vllm.json

``ngram`` drafts from the text at hand. ``suffix`` also drafts from earlier answers of its process; it needs the package
arctic-inference in vLLM's environment. vLLM takes a minute to start, so a method answers all workloads of a target in
one process, and ``suffix`` also has the answers of earlier workloads. A killed run continues after its last target.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import TARGET, TARGETS, build_parser, rows_of, summary
from benchmarks.peers import HERE, vllm_variables
from benchmarks.recorded import Finished, record_main
from benchmarks.results_page import memory
from fsd_bench.process import ProcessMethod
from fsd_infer.targets.loading import load_tokenizer, resolve_target

METHODS = {"vllm": [], "vllm ngram": ["--drafts", "ngram"], "vllm suffix": ["--drafts", "suffix"]}


def answers_of(method: ProcessMethod, tokenizer: Any, rows: Sequence[dict[str, Any]], new: int) -> Iterator[Any]:
    """Yield what each turn of each row took, as the record of benchmarks.memory has it."""
    method.answer([tokenizer("Say a word.")["input_ids"]], {"max_new_tokens": 8}, 0)
    for number, row in enumerate(rows):
        options: dict[str, Any] = {"max_new_tokens": row.get("new", new)}
        if "temperature" in row:
            options |= {"do_sample": True, "temperature": row["temperature"]}
        if "schema" in row:
            options["schema"] = row["schema"]
        messages: list[dict[str, str]] = []
        for text in row["turns"]:
            messages.append({"role": "user", "content": text})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            run = method.answer([ids], options, number)
            answer = run.answers[0]
            messages.append({"role": "assistant", "content": tokenizer.decode(answer.tokens, skip_special_tokens=True)})
            yield {
                "workload": row["workload"], "row": number, "tokens": answer.length,
                "forwards": answer.target_forwards, "seconds": run.seconds, "prefill": run.prefill_seconds,
            }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record: answers by method, and their summary."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(args):
        target = TARGETS.get(row["workload"], TARGET) if args.target == TARGET else args.target
        groups.setdefault(target, []).append(row)
    done = Finished(args.json)
    answers: dict[str, list[Any]] = {name: [] for name in args.methods.split(",")}
    for (target, rows), name in itertools.product(groups.items(), answers):
        job = json.dumps([name, target, args.max_new_tokens, args.threads, rows])
        digest = hashlib.sha256(job.encode()).hexdigest()
        if digest not in done:
            print(f"[{target}: {name}]", file=sys.stderr, flush=True)
            directory = str(resolve_target(target))
            command = [str(args.vllm.absolute()), str(HERE / "run_vllm.py"), directory, *METHODS[name]]
            method = ProcessMethod(name, command, vllm_variables(args.vllm.absolute(), args.threads))
            done[digest] = list(answers_of(method, load_tokenizer(directory), rows, args.max_new_tokens))
            method.close()
        answers[name] += done[digest]
    baseline = next(iter(answers))
    return {"baseline": baseline, "workloads": summary(answers, baseline), "answers": answers}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = build_parser("benchmarks.memory_in_vllm", __doc__)
    parser.set_defaults(methods="vllm ngram,vllm suffix", workloads="chat,rag,summaries,replay,samples,edits,json")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm/bin/python"), help="(%(default)s)")
    return record_main("benchmarks.memory_in_vllm", parser, measure, memory, argv)


if __name__ == "__main__":
    sys.exit(main())
