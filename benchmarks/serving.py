"""Structured output: schemas of a public suite, and speed with and without a schema.

    python -m benchmarks.serving schemas --json benchmarks/results/serving-schemas.json
    python -m benchmarks.serving speed --json benchmarks/results/serving-speed.json [--server URL]

``schemas`` asks the built-in model for an answer to every schema of the suite that the guide supports. An answer that
ended must parse, and validate where the package ``jsonschema`` is installed. ``speed`` decodes prompts with a schema,
with a schema and no forced drafts, and without a schema, in turns. It measures vLLM through a server of its own: give
its address as ``--server``.
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
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.recorded import record_main
from fsd_bench.openai_client import Server
from fsd_infer import FsdError, FuzzyDecoder
from fsd_infer.decoder.fuzzy import Generation
from fsd_infer.drafters import forced
from fsd_infer.engine.rounds import Round
from fsd_infer.request.guide import Follower, Guide, GuideProcessor

SUITE = Path(__file__).resolve().parent.parent / "tests" / "data" / "json_schemas.jsonl"
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
    """A logits processor that favours tokens by which JSON values end. Small models fill objects without end."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.liked = torch.tensor([place for place, piece in enumerate(pieces) if piece and piece[0] in '"}]'])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self.liked, torch.full((len(scores), len(self.liked)), 6.0))


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
    """An answer that ended; None if neither a free sample did, nor one that favours the ends of values."""
    question = f"Write JSON for this schema: {json.dumps(schema)[:300]}"
    options = {"do_sample": True, "temperature": 0.7, "top_k": None, "max_new_tokens": args.max_new_tokens}
    for processors in ([], [Closing(decoder.tokenizer)]):
        made = decoder.generate(question, guide=guide, seed=seed, logits_processor=processors, **options)
        if made.stats.rows[0].finish_reason == "stop":
            return made.texts[0]
    return None


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Decode every task by every method, in turns."""
    decoder = FuzzyDecoder.from_pretrained(args.target)
    methods = {"schema": (True, 16), "schema, nothing forced": (True, 0), "free": (False, 0)}
    runs: dict[str, list[Generation]] = {name: [] for name in methods}
    watches = {name: Watch() for name in methods}
    for repeat in range(args.repeats + 1):
        for task, properties in TASKS.items():
            for name, (has_schema, most) in methods.items():
                watch = watches[name] if repeat else Watch()  # the first turn warms up
                with mock.patch.object(forced, "MOST", most), watch.watching():
                    schema = schema_of(properties) if has_schema else None
                    question = f"{task} Answer in JSON with the fields {', '.join(properties)}."
                    made = decoder.generate(
                        question, schema=schema, on_round=watch.round, max_new_tokens=args.max_new_tokens, temperature=0
                    )
                runs[name] += [made] * bool(repeat)
    record: dict[str, Any] = {}
    record["methods"] = {name: {**of_runs(runs[name]), **watches[name].summary()} for name in methods}
    if args.server:
        record["methods"]["server"] = of_server(Server(args.server), args)
    return record


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has all properties, and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def of_runs(runs: Sequence[Generation]) -> dict[str, float]:
    """Speed and counts, the prefill included."""
    rows = [run.stats.rows[0] for run in runs]
    tokens, forwards = sum(row.new_tokens for row in rows), sum(row.target_forwards for row in rows)
    return {
        "tokens_per_second": statistics.median(
            row.new_tokens / run.stats.seconds for row, run in zip(rows, runs, strict=True)
        ),
        "tokens_per_forward": (tokens - len(rows)) / forwards,
        "tokens": tokens / len(rows),
        "forwards": forwards / len(rows),
    }


def of_server(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """The same tasks through a server with the OpenAI API."""
    speeds, tokens, model = [], [], server.models()[0]["id"]
    for repeat in range(args.repeats + 1):
        for task, properties in TASKS.items():
            question = f"{task} Answer in JSON with the fields {', '.join(properties)}."
            body = {"model": model, "prompt": question, "max_tokens": args.max_new_tokens, "temperature": 0}
            start = time.perf_counter()
            reply = server.complete({**body, "guided_json": schema_of(properties)})
            if repeat:
                tokens.append(reply["usage"]["completion_tokens"])
                speeds.append(tokens[-1] / (time.perf_counter() - start))
    return {"tokens_per_second": statistics.median(speeds), "tokens": sum(tokens) / len(tokens)}


def report(record: dict[str, Any]) -> str:
    """The record in a few lines."""
    if "counts" in record:
        return json.dumps(record["counts"])
    lines = [f"{name}: {json.dumps(facts)}" for name, facts in record["methods"].items()]
    if "server" not in record["methods"]:
        lines.append("vLLM was not measured: start `vllm serve` and give its address as --server.")
    return "\n".join(lines)


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
    parser.add_argument("--server", help="address of a server with the OpenAI API to measure too, such as vLLM's")
    parser.add_argument("--json", type=Path, required=True, help="file of the record")
    parts = {"schemas": schemas, "speed": speed}
    return record_main("benchmarks.serving", parser, lambda args: parts[args.part](args), report, argv)


if __name__ == "__main__":
    sys.exit(main())
