"""Structured output: schemas of a public suite, and speed with and without a schema.

    python -m benchmarks.serving schemas --json benchmarks/results/serving-schemas.json
    python -m benchmarks.serving speed --json benchmarks/results/serving-speed.json [--vllm PYTHON]

``schemas`` asks the built-in model for an answer to every schema of the suite that the guide supports. An answer that
ended must parse, and validate where the package ``jsonschema`` is installed. ``speed`` decodes prompts with a schema,
with a schema and no forced drafts, and without a schema, in turns. With ``--vllm``, vLLM then decodes the same prompts
in a process of its own, without drafts and with n-gram drafts, with and without a schema.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.peers import prepare
from benchmarks.recorded import ROOT, record_main
from fsd_bench import parse_methods
from fsd_bench.methods import METHODS
from fsd_bench.models import ModelOptions, Models
from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.drafters import forced
from fsd_infer.engine.request import Round
from fsd_infer.request.guide import Follower, Guide, GuideProcessor
from fsd_infer.targets.loading import resolve_target

SUITE = ROOT / "tests" / "data" / "json_schemas.jsonl"
TEXT, WHOLE = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 99}
TASKS: dict[str, dict[str, Any]] = {  # what to write -> properties, all of them required
    "Describe a pet cat.": {"name": TEXT, "colour": {"enum": ["black", "white", "grey"]}, "age_in_years": WHOLE},
    "Describe a book.": {"title": TEXT, "author": TEXT, "published_in": TEXT, "is_translated": {"type": "boolean"}},
    "Rate a restaurant.": {"restaurant_name": TEXT, "food_rating": WHOLE, "service_rating": WHOLE, "comment": TEXT},
    "Plan a walk.": {"starting_point": TEXT, "destination": TEXT, "kilometres": WHOLE, "is_steep": {"type": "boolean"}},
}  # fmt: skip


class Watch:
    """Seconds that the guide takes in each round, beside the round's own."""

    def __init__(self) -> None:
        self.guide, self.rounds, self.nodes, self._open = list[float](), list[float](), 0, 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Time the guide's two entries: masks of a tree, and forced tokens."""
        watch, masks, tokens = self, GuideProcessor.nodes, Follower.forced

        def nodes(self: GuideProcessor, scores: torch.Tensor, *arguments: Any) -> torch.Tensor:
            start = time.perf_counter()
            made = masks(self, scores, *arguments)
            watch._open += time.perf_counter() - start
            watch.nodes += scores.shape[0] * scores.shape[1]
            return made

        def forced_tokens(self: Follower, answer: list[int]) -> list[int]:
            start = time.perf_counter()
            made = tokens(self, answer)
            watch._open += time.perf_counter() - start
            return made

        with mock.patch.object(GuideProcessor, "nodes", nodes), mock.patch.object(Follower, "forced", forced_tokens):
            yield

    def round(self, row: int, round: Round) -> None:
        """End a round, the prefill too, which is left out."""
        if not round.seconds.get("prefill"):
            self.guide.append(self._open)
            self.rounds.append(sum(round.seconds.values()))
        self._open = 0.0

    def summary(self) -> dict[str, Any]:
        """Medians over rounds, in microseconds."""
        shares = [guide / whole for guide, whole in zip(self.guide, self.rounds, strict=True) if whole]
        return {
            "rounds": len(self.rounds),
            "masks": self.nodes,
            "guide_microseconds_per_round": 1e6 * statistics.median(self.guide),
            "round_microseconds": 1e6 * statistics.median(self.rounds),
            "guide_share_of_a_round": statistics.median(shares),
        }


class Closing:
    """A logits processor that favours tokens by which JSON values and texts end. Small models write without end."""

    def __init__(self, tokenizer: Any, bonus: float = 6.0) -> None:
        self.bonus = bonus  # nats
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        ends = [place for place, piece in enumerate(pieces) if piece and piece[0] in '"}]']
        self.liked = torch.tensor([*ends, tokenizer.eos_token_id])  # a number ends with the text only

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.liked, torch.full((len(scores), len(self.liked)), self.bonus))


def suite() -> Iterator[dict[str, Any]]:
    """Yield the suite's lines: ``file``, ``about`` and ``schema``."""
    with SUITE.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def faults_of(answer: str, schema: Any, counts: Counter[str]) -> list[str]:
    """Parse and validate an answer, and count how far it came."""
    try:
        value = json.loads(answer)
    except ValueError as error:
        return [f"does not parse: {error}"]
    counts["parsed"] += 1
    try:
        import jsonschema

        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        faults = [error.message for error in kind(schema).iter_errors(value)]
    except (ImportError, re.error):  # no package, or a pattern that Python's regular expressions lack
        counts["parsed, not validated"] += 1
        return []
    counts["valid"] += not faults
    return faults


def schemas(args: argparse.Namespace) -> dict[str, Any]:
    """Answer every supported schema of the suite, but for those that the file of answers holds."""
    args.answers.touch()
    known = {one["number"]: one["answer"] for one in map(json.loads, args.answers.read_text("utf-8").splitlines())}
    decoder = FuzzyDecoder.from_pretrained(args.target)
    counts, refused, failures = Counter[str](), Counter[str](), []
    for number, line in enumerate(suite()):
        if counts["supported"] == args.limit:
            break
        counts["schemas"] += 1
        try:
            guide = Guide.json_schema(json.dumps(line["schema"]))
        except FsdError as error:
            refused[str(error).partition("followed: ")[2][:60]] += 1
            continue
        counts["supported"] += 1
        if number not in known:
            known[number] = answer_to(decoder, line["schema"], guide, number, args)
            with args.answers.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"number": number, "answer": known[number]}) + "\n")
        answer = known[number]
        if answer is None:
            counts["cut at the length limit"] += 1
            continue
        counts["ended"] += 1
        faults = faults_of(answer, line["schema"], counts)
        if faults:
            failures.append({"about": f"{line['file']}: {line['about']}", "answer": answer[:200], "faults": faults})
    return {
        "counts": dict(counts),
        "refused": dict(refused.most_common()),
        "failures": failures,
    }


def answer_to(decoder: FuzzyDecoder, schema: Any, guide: Guide, seed: int, args: argparse.Namespace) -> str | None:
    """An answer that ended; None if neither a free sample did, nor those that favour ends."""
    question = f"Write JSON for this schema: {json.dumps(schema)[:300]}"
    options = {"do_sample": True, "temperature": 0.7, "top_k": None, "max_new_tokens": args.max_new_tokens}
    for processors in ([], [Closing(decoder.tokenizer)], [Closing(decoder.tokenizer, 12.0)]):
        made = decoder.generate(question, guide=guide, seed=seed, logits_processor=processors, **options)
        if made.stats.rows[0].finish_reason == "stop":
            return made.texts[0]
    return None


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Decode every task by every method, in turns; then by vLLM."""
    decoder = FuzzyDecoder.from_pretrained(args.target)
    methods = {"schema": (True, 16), "schema, nothing forced": (True, 0), "free": (False, 0)}
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    watches = {name: Watch() for name in methods}
    for repeat in range(args.repeats + 1):
        for ids, schema in questions(decoder):
            for name, (has_schema, most) in methods.items():
                watch = watches[name] if repeat else Watch()  # the first turn warms up
                with mock.patch.object(forced, "MOST", most), watch.watching():
                    start = time.perf_counter()
                    made = decoder.generate(
                        [ids], schema=schema if has_schema else None, on_round=watch.round,
                        max_new_tokens=args.max_new_tokens, temperature=0,
                    )  # fmt: skip
                    seconds = time.perf_counter() - start
                row = made.stats.rows[0]
                runs[name] += [Run(row.new_tokens, row.target_forwards, seconds)] * bool(repeat)
    record = {name: {**of_runs(runs[name]), **watches[name].summary()} for name in methods}
    return {"methods": {**record, **(in_vllm(decoder, args) if args.vllm else {})}}


def in_vllm(decoder: FuzzyDecoder, args: argparse.Namespace) -> dict[str, Any]:
    """The same tasks in vLLM, which answers in a process that ends before the next one starts."""
    record: dict[str, Any] = {}
    files = {"directory": str(resolve_target(args.target))}
    for text in prepare(["vllm", "vllm:ngram"], ROOT, {"vllm": args.vllm.absolute()}, files, torch.get_num_threads()):
        spec = parse_methods([text])[0]
        method = METHODS.get(spec.kind).make(spec, Models(ModelOptions()))
        runs: dict[str, list[Run]] = {f"{text}, schema": [], f"{text}, free": []}
        for repeat in range(args.repeats + 1):
            for ids, schema in questions(decoder):
                for name, asked in zip(runs, ({"schema": schema}, {}), strict=True):
                    made = method.answer([ids], {"max_new_tokens": args.max_new_tokens, **asked}, 0)
                    forwards = made.answers[0].target_forwards or 0
                    runs[name] += [Run(made.answers[0].length, forwards, made.seconds)] * bool(repeat)
        facts = method.describe()
        method.close()
        record |= {name: {**of_runs(each), "version": facts["version"]} for name, each in runs.items()}
    return record


def questions(decoder: FuzzyDecoder) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield the prompt of each task, and its schema."""
    for task, properties in TASKS.items():
        question = f"{task} Answer in JSON with the fields {', '.join(properties)}."
        yield decoder.encode([{"role": "user", "content": question}]), schema_of(properties)


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has all properties, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


class Run(NamedTuple):
    """One answer: its tokens, the target forwards after the prefill, and the seconds of the whole call."""

    tokens: int
    forwards: int
    seconds: float


def of_runs(runs: Sequence[Run]) -> dict[str, float]:
    """Speed and counts, the prefill included."""
    tokens, forwards = sum(run.tokens for run in runs), sum(run.forwards for run in runs)
    return {
        "tokens_per_second": statistics.median(run.tokens / run.seconds for run in runs),
        "tokens_per_forward": (tokens - len(runs)) / forwards,
        "tokens": tokens / len(runs),
        "forwards": forwards / len(runs),
    }


def report(record: dict[str, Any]) -> str:
    """The record in a few lines."""
    if "counts" in record:
        return json.dumps(record["counts"])
    return "\n".join(f"{name}: {json.dumps(facts)}" for name, facts in record["methods"].items())


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["schemas", "speed"])
    parser.add_argument("--target", default="smollm2-135m", help="built-in name or directory (%(default)s)")
    parser.add_argument("--limit", type=int, help="schemas to answer (default: all that are supported)")
    parser.add_argument("--answers", type=Path, default=Path("serving-answers.partial.jsonl"),
                        help="file of the schemas' answers; the same command continues it (%(default)s)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=192, help="largest length of an answer (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every task (%(default)s)")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM, to measure that too")
    parser.add_argument("--json", type=Path, required=True, help="file of the record")
    parts = {"schemas": schemas, "speed": speed}
    return record_main("benchmarks.serving", parser, lambda args: parts[args.part](args), report, argv)


if __name__ == "__main__":
    sys.exit(main())
