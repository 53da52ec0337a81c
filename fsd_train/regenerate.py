"""`fsd-train regenerate`: the target's own answers to prompts, the text a drafter is trained on.

The output is JSONL, one answer per line, written in whole lines that are on disk before the next batch begins. A killed
run is continued by the same command: a torn last line is cut off and rows already there are not made again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from fsd_infer.chat.encoding import encode_chat, read_jsonl, read_prompts
from fsd_infer.chat.rows import rows_digest
from fsd_infer.cli.options import MOST_SEED, positive, whole_number
from fsd_infer.cli.run import Parser
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.errors import ContextLengthError, DataError, FsdError
from fsd_infer.files import read_json, write_json
from fsd_infer.openai_client import API_KEY
from fsd_infer.targets.loading import builtin_dir, is_builtin, parse_dtype
from fsd_train.backends import RULE, Answer, Backend, EndpointBackend, Job, LocalBackend, stable_seed

WINDOW = 16  # batches that are sorted by length together: little padding, while any prefix stays a fair sample


@dataclass(frozen=True)
class Plan:
    """What is to be answered: ``batches`` in their final order, and how many prompts were ``read`` and ``too_long``."""

    batches: list[list[Job]]
    read: int
    too_long: int

    @property
    def ids(self) -> set[str]:
        return {job.id for batch in self.batches for job in batch}


def plan_jobs(
    paths: Sequence[str | Path],
    tokenizer: Any,
    *,
    temperatures: Sequence[tuple[float, float]] = ((0.0, 1.0),),
    max_prompt_tokens: int = 256,
    limit: int | None = None,
    limit_per_file: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
) -> Plan:
    """Reads prompts and settles which are answered, at which temperature and in which batches.

    Everything here depends on the arguments alone, never on what is already answered, so that a resumed run meets the
    very batches it left. Rows are taken in an order shuffled by ``seed``: a prefix of the output is a fair sample.

    Args:
        paths: prompt files.
        tokenizer: the target's.
        temperatures: (temperature, weight) pairs; each row gets one by the hash of its id.
        max_prompt_tokens: longer prompts (template included) are left out and counted.
        limit, limit_per_file: how many rows to answer, overall and of each file.
    """
    chosen: list[Job] = []
    known: set[str] = set()
    read = too_long = 0
    for path in paths:
        rows = sorted(read_prompts(path), key=lambda row: _shuffle_key(seed, row.id))
        taken = 0
        for row in rows:
            if limit_per_file is not None and taken >= limit_per_file:
                break
            read += 1
            try:
                prompt_ids = encode_chat(tokenizer, row.messages)
            except DataError as error:
                raise DataError(f"{path}:{row.line}: {error}") from error
            if len(prompt_ids) > max_prompt_tokens:
                too_long += 1
            elif row.id not in known:  # the same file given twice
                known.add(row.id)
                taken += 1
                chosen.append(Job(row.id, row.messages, prompt_ids, pick_temperature(row.id, temperatures), row.source))
    chosen.sort(key=lambda job: _shuffle_key(seed, job.id))
    return Plan(_batches(chosen[:limit], batch_size), read, too_long)


def _shuffle_key(seed: int, row_id: str) -> tuple[int, str]:
    return stable_seed(seed, "order", row_id), row_id


def pick_temperature(row_id: str, temperatures: Sequence[tuple[float, float]]) -> float:
    """One of the (temperature, weight) pairs' temperatures, drawn by the hash of the row's id."""
    point = stable_seed("temperature", row_id) / 2**31 * sum(weight for _, weight in temperatures)
    for temperature, weight in temperatures:
        point -= weight
        if point < 0:
            return temperature
    return temperatures[-1][0]


def _batches(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    batches = []
    for start in range(0, len(jobs), WINDOW * size):
        window = jobs[start : start + WINDOW * size]
        for temperature in sorted({job.temperature for job in window}):
            same = sorted(
                (job for job in window if job.temperature == temperature), key=lambda job: len(job.prompt_ids)
            )
            batches += [same[i : i + size] for i in range(0, len(same), size)]
    return batches


class AnswerFile:
    """A JSONL file of answers that only ever holds whole lines, with its settings beside it in ``<name>.meta.json``.

    Args:
        path: the .jsonl file, or a directory that will hold answers.jsonl.
        settings: what the answers depend on; a file begun with other settings is refused.

    Raises:
        FsdError: the settings differ.
        DataError: a line of the file is malformed.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        path = Path(path)
        self.path = path if path.suffix == ".jsonl" else path / "answers.jsonl"
        self.meta_path = self.path.with_suffix(".meta.json")
        self.settings = settings

    @contextmanager
    def open(self) -> Iterator[tuple[set[str], IO[bytes]]]:
        """Yields the ids that are answered already and the file to append to. One process at a time may hold it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise FsdError(
                    f"{self.path}: another run is writing it. Wait for it or choose another --output."
                ) from error
            self._check_settings()
            self._cut_torn_line()
            yield self._done(), file

    def append(self, file: IO[bytes], answers: Sequence[Answer]) -> None:
        """Writes the answers and returns when they are on disk."""
        file.write(b"".join(answer_line(answer) for answer in answers))
        file.flush()
        os.fsync(file.fileno())

    def _check_settings(self) -> None:
        if not self.meta_path.exists():
            if self.path.stat().st_size:
                raise FsdError(f"{self.path} has rows but no {self.meta_path.name}. Choose another --output.")
            write_json(self.meta_path, self.settings, indent=1)
            return
        found = read_json(self.meta_path, "Choose another --output.")
        wanted = json.loads(json.dumps(self.settings))  # as JSON holds it: tuples are lists there
        differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        if differing:
            what = ", ".join(f"{key} was {found.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
            raise FsdError(f"{self.path} was begun with other settings: {what}. Give those, or another --output.")

    def _cut_torn_line(self) -> None:
        with open(self.path, "r+b") as file:
            end = keep = file.seek(0, os.SEEK_END)
            while keep:  # back to the last line end
                step = min(keep, 65536)
                file.seek(keep - step)
                found = file.read(step).rfind(b"\n")
                if found >= 0:
                    keep += found + 1 - step
                    break
                keep -= step
            if keep != end:
                file.truncate(keep)

    def _done(self) -> set[str]:
        done: set[str] = set()
        for line, row in read_jsonl(self.path):
            if not isinstance(row.get("id"), str):
                raise DataError(f"{self.path}:{line}: no `id`; this is not a file of answers. Choose another --output.")
            done.add(row["id"])
        return done


def answer_line(answer: Answer) -> bytes:
    """One answer as a line of JSON, newline included."""
    row = {
        "id": answer.job.id,
        "messages": answer.job.messages,
        "response": answer.response,
        "prompt_ids": answer.job.prompt_ids,
        "response_ids": answer.response_ids,
        "finish_reason": answer.finish_reason,
        "temperature": answer.job.temperature,
        "source": answer.job.source,
        "ids_from": answer.ids_from,
    }
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def regenerate(plan: Plan, backend: Backend, output: AnswerFile, progress: bool = True) -> Counter[str]:
    """Answers what of ``plan`` is not yet in ``output``.

    Returns:
        Counts: answered (by this run), kept (from earlier ones), tokens, stop, length, too_long, read.
    """
    counts: Counter[str] = Counter(read=plan.read, too_long=plan.too_long)
    with output.open() as (done, file):
        counts["kept"] = len(done & plan.ids)
        with tqdm(
            total=len(plan.ids), initial=counts["kept"], unit="answer", disable=not progress, smoothing=0.05
        ) as bar:
            for group in backend.answer(plan.batches, done):
                fresh = [answer for answer in group if answer.job.id not in done]
                output.append(file, fresh)
                done.update(answer.job.id for answer in fresh)
                for answer in fresh:
                    counts["answered"] += 1
                    counts["tokens"] += len(answer.response_ids)
                    counts[answer.finish_reason] += 1
                bar.update(len(fresh))
                bar.set_postfix(tokens=counts["tokens"])
    return counts


def _temperature(text: str) -> tuple[float, float]:
    value, _, weight = text.partition(":")
    pair = float(value), float(weight or 1)
    if not (0 <= pair[0] < float("inf") and 0 < pair[1] < float("inf")):
        raise argparse.ArgumentTypeError(f"{text}: needs a temperature >= 0 and a weight > 0")
    return pair


def parser() -> argparse.ArgumentParser:
    """The command line of `fsd-train regenerate`."""
    p = Parser(prog="fsd-train regenerate", description=(__doc__ or "").replace("`", ""))
    p.add_argument("--target", required=True, help="built-in name, directory or hub id of the target")
    p.add_argument(
        "--prompts", required=True, nargs="+", help="files or directories of prompts: see docs/training-data.md"
    )
    p.add_argument("--output", required=True, help="a .jsonl file, or a directory that will hold answers.jsonl")
    p.add_argument("--max-new-tokens", type=positive, default=192)
    p.add_argument("--max-prompt-tokens", type=positive, default=256, help="longer prompts are left out and counted")
    p.add_argument(
        "--temperature", type=_temperature, nargs="+", default=[(0.0, 1.0)], metavar="T[:WEIGHT]",
        help="one value, or several that rows are spread over: 0:0.7 0.8:0.3",
    )  # fmt: skip
    p.add_argument("--limit", type=positive, help="answer so many prompts, a sample drawn by --seed")
    p.add_argument("--limit-per-file", type=positive)
    p.add_argument("--seed", type=whole_number(0, MOST_SEED), default=0)
    p.add_argument("--batch-size", type=positive, default=32)
    p.add_argument("--dtype", help="of the local target: bfloat16, float32, ...")
    p.add_argument("--device", help="of the local target")
    p.add_argument(
        "--drafter", default="none",
        help="of the local target: what fsd-infer takes, e.g. shipped or shipped+lookup; the answers' law is the "
        "target's own with any (%(default)s)",
    )  # fmt: skip
    p.add_argument("--endpoint", metavar="URL", nargs="+", help="let OpenAI-compatible servers generate instead")
    p.add_argument("--endpoint-model", metavar="NAME", help="name under which the server knows the target")
    p.add_argument("--concurrency", type=positive, default=64, help="requests in flight at the endpoint")
    p.add_argument("--no-request-seeds", action="store_true", help="for servers that cannot seed single requests")
    p.add_argument(
        "--api-key-env",
        default=API_KEY,
        metavar="VAR",
        help="environment variable with the endpoint's key (%(default)s)",
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises FsdError for bad input."""
    counts = run(parser().parse_args(argv))
    print(
        f"{counts['answered']} answered ({counts['tokens']} tokens; {counts['stop']} ended by themselves, "
        f"{counts['length']} cut at the limit), {counts['kept']} kept from earlier runs, "
        f"{counts['too_long']} of {counts['read']} prompts left out as too long"
    )
    return 0


def run(args: argparse.Namespace) -> Counter[str]:
    """`main` with parsed arguments. Raises FsdError on bad input."""
    backend = _endpoint(args) if args.endpoint else _local(args)
    plan = plan_jobs(
        args.prompts,
        backend.tokenizer,
        temperatures=args.temperature,
        max_prompt_tokens=args.max_prompt_tokens,
        limit=args.limit,
        limit_per_file=args.limit_per_file,
        seed=args.seed,
        batch_size=args.batch_size,
    )
    if isinstance(backend, LocalBackend):
        window = backend.decoder.target.max_positions
        longest = max((len(job.prompt_ids) for batch in plan.batches for job in batch), default=0)
        if window is not None and longest + args.max_new_tokens > window:
            raise ContextLengthError(
                f"a prompt of {longest} tokens and {args.max_new_tokens} new ones exceed the target's context of "
                f"{window}. Lower --max-prompt-tokens or --max-new-tokens."
            )
    return regenerate(plan, backend, AnswerFile(args.output, _settings(args)), progress=not args.quiet)


def _local(args: argparse.Namespace) -> LocalBackend:
    decoder = FuzzyDecoder.from_pretrained(args.target, args.drafter, dtype=parse_dtype(args.dtype), device=args.device)
    return LocalBackend(decoder, args.max_new_tokens, args.seed)


def _endpoint(args: argparse.Namespace) -> EndpointBackend:
    """Of the target itself only the tokenizer and the generation config are needed."""
    directory = builtin_dir(args.target) if is_builtin(args.target) else args.target
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise FsdError(f"target {args.target!r}: no tokenizer found ({error}).") from error
    return EndpointBackend(
        args.endpoint, args.endpoint_model or args.target, tokenizer, _generation_config(directory),
        args.max_new_tokens, None if args.no_request_seeds else args.seed, args.concurrency,
        args.batch_size, os.environ.get(args.api_key_env, ""),
    )  # fmt: skip


def _generation_config(directory: str | Path) -> GenerationConfig | None:
    """The target's, read as transformers does; None where there is a tokenizer alone."""
    try:
        return GenerationConfig.from_pretrained(directory)
    except OSError:  # the model has no such file: what is said of generation is in its config
        pass
    try:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(directory))
    except (OSError, ValueError):
        return None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the answers depend on. Where they are made is not part of it, but batches and drafts shape local ones."""
    names = ["target", "max_new_tokens", "max_prompt_tokens", "temperature", "limit", "limit_per_file", "seed"]
    settings = {name: getattr(args, name) for name in names}
    settings["backend"] = "endpoint" if args.endpoint else "local"
    if args.endpoint:
        settings["endpoint_model"] = args.endpoint_model
    else:
        settings.update(batch_size=args.batch_size, dtype=args.dtype, rule=RULE, drafter=args.drafter)
    digests: dict[str, list[str]] = {}
    for path in args.prompts:
        digests.setdefault(Path(path).name, []).append(rows_digest(path))
    settings["prompts"] = {name: found[0] if len(found) == 1 else found for name, found in digests.items()}
    return settings


if __name__ == "__main__":
    sys.exit(main())
