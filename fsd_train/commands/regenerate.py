"""`fsd-train regenerate`: the target's answers to prompts, as training data.

The output is JSONL with one answer per line. Whole lines are on disk before the next batch begins. The same command
continues a killed run: it removes a torn last line and skips finished rows.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig

from fsd_core.errors import ContextLengthError, DataError, FsdError
from fsd_core.files import disk_errors, read_json, writable, write_json
from fsd_core.hub import guarded, hub_fault
from fsd_core.locks import lock_for_run
from fsd_core.text.control import set_control_tokens
from fsd_core.text.conversations import TOOLS
from fsd_core.text.row_check import RowCheck, listing_of
from fsd_core.text.rows import read_jsonl, rows_digest
from fsd_core.text.templates import fields_of
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.targets.loading import builtin_dir, is_builtin, load_config
from fsd_infer.targets.masks import max_positions
from fsd_infer.targets.placing import parse_dtype
from fsd_train import LONGEST
from fsd_train.commands.fit import read_recipe, target_kwargs_of
from fsd_train.data.backends import RULE, AnswerBackend, EndpointBackend, LocalBackend
from fsd_train.data.plan import PromptSchedule, answer_line, next_turns, plan_jobs

OTHER_FORMS = (".json", ".gz", ".csv", ".tsv", ".txt", ".parquet")


class AnswerFile:
    """A JSONL file of whole lines of answers, with its settings in ``<name>.meta.json``.

    Args:
        path: the .jsonl file, or a directory for answers.jsonl.
        settings: settings that determine the answers; a file with other settings is refused.

    Raises:
        FsdError: the settings differ.
        DataError: a line of the file is malformed, or its name is of another form.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        path = Path(path)
        if path.suffix in OTHER_FORMS and not path.is_dir():
            raise DataError(f"{path}: answers are written as JSON lines. Give a .jsonl file, or a directory.")
        self.path = path if path.suffix == ".jsonl" else path / "answers.jsonl"
        self.meta_path = self.path.with_suffix(".meta.json")
        self.settings = settings

    @contextmanager
    def open(self) -> Iterator[tuple[set[str], IO[bytes]]]:
        """Yield the finished ids and the file to append to. Only one process may hold it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(self.path), open(self.path, "ab") as file:
            lock_for_run(file.fileno(), self.path, "Wait for it or choose another --output.", FsdError)
            self._check_settings()
            self._cut_torn_line()
            yield self._done(), file

    def append(self, file: IO[bytes], lines: Sequence[bytes]) -> None:
        """Write whole lines, each of JSON with an ``id``; return when they are on disk."""
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())

    def answers(self) -> dict[str, tuple[str, str]]:
        """Return response and finish_reason by id."""
        return {row["id"]: (row["response"], row["finish_reason"]) for _, row in read_jsonl(self.path)}

    def _check_settings(self) -> None:
        if not self.meta_path.exists():
            if self.path.stat().st_size:
                raise FsdError(f"{self.path} has rows but no {self.meta_path.name}. Choose another --output.")
            write_json(self.meta_path, self.settings, indent=1)
            return
        meta = read_json(self.meta_path, "Choose another --output.")
        if not isinstance(meta, dict):
            raise FsdError(f"{self.meta_path} holds no settings of a run. Choose another --output.")
        settings = json.loads(json.dumps(self.settings))  # JSON turns tuples into lists
        differing = sorted(key for key in {*meta, *settings} if meta.get(key) != settings.get(key))
        if _same_total(meta, settings):
            differing.remove("max_prompt_tokens")  # it follows from max_new_tokens
        if differing:
            what = ", ".join(f"{key} was {meta.get(key)!r}, now {settings.get(key)!r}" for key in differing)
            raise FsdError(f"{self.path} was begun with other settings: {what}. Give those, or another --output.")

    def _cut_torn_line(self) -> None:
        with open(self.path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    end = content.rfind(b"\n") + 1
                file.truncate(end)

    def _done(self) -> set[str]:
        done: set[str] = set()
        for line, row in read_jsonl(self.path):
            if not isinstance(row.get("id"), str):
                raise DataError(f"{self.path}:{line}: no `id`; this is not a file of answers. Choose another --output.")
            done.add(row["id"])
        return done


def regenerate(plan: PromptSchedule, backend: AnswerBackend, output: AnswerFile, progress: bool = True) -> Counter[str]:
    """Answer the jobs of ``plan`` that ``output`` lacks.

    Returns:
        Counts: answered (by this run), kept (from earlier ones), tokens, stop, length.
    """
    counts: Counter[str] = Counter()
    with output.open() as (done, file):
        counts["kept"] = len(done & plan.ids)
        with tqdm(
            total=len(plan.ids), initial=counts["kept"], unit="answer", disable=not progress, smoothing=0.05
        ) as bar:
            for group in backend.answer(plan.batches, done):
                fresh = [answer for answer in group if answer.job.id not in done]
                output.append(file, [answer_line(answer) for answer in fresh])
                done.update(answer.job.id for answer in fresh)
                for answer in fresh:
                    counts["answered"] += 1
                    counts["tokens"] += len(answer.response_ids)
                    counts[answer.finish_reason] += 1
                bar.update(len(fresh))
                bar.set_postfix(tokens=counts["tokens"])
    return counts


def main(args: argparse.Namespace) -> int:
    """Run `fsd-train regenerate`. Raises FsdError for bad input."""
    counts = run(args)
    print(
        f"{counts['answered']} answered ({counts['tokens']} tokens; {counts['stop']} ended by themselves, "
        f"{counts['length']} cut at the limit), {counts['kept']} kept from earlier runs, "
        f"{counts['too_long']} of {counts['read']} prompts skipped as too long"
        + (f", {counts['later']} later turns skipped" if counts["later"] else "")
    )
    return 0


def run(args: argparse.Namespace) -> Counter[str]:
    """Run the command with parsed arguments. Raises FsdError for bad input."""
    resolve(args)
    if args.endpoint and args.features:
        raise DataError("--features needs the local target. With --endpoint, run `cache-features` afterwards.")
    writable(AnswerFile(args.output, {}).path, "the file of answers")
    backend = _endpoint(args) if args.endpoint else _local(args)
    check, reader = RowCheck(args.strict), backend.reader
    plan = plan_jobs(
        args.prompts,
        backend.tokenizer,
        temperatures=args.temperature,
        max_prompt_tokens=args.max_prompt_tokens,
        limit=args.limit,
        seed=args.seed,
        batch_size=args.batch_size,
        template=args.chat_template_args,
        raw=args.raw,
        check=check,
        reader=reader,
    )
    output = AnswerFile(args.output, _settings(args))
    check.finish(listing_of(output.path))
    if not plan.read:
        raise DataError(f"{', '.join(map(str, args.prompts))}: there is no prompt to answer.")
    check.name_unread({TOOLS} & {*fields_of(backend.tokenizer)})
    _report_skipped(plan, args)
    window = context_of(args.target)
    longest = max((len(job.prompt_ids) for job in plan.jobs), default=0)
    if window is not None and longest + args.max_new_tokens > window:
        raise ContextLengthError(
            f"a prompt of {longest} tokens and {args.max_new_tokens} new ones exceed the target's context of "
            f"{window}. Lower --max-prompt-tokens or --max-new-tokens."
        )
    if window is not None:  # earlier answers make later turns' prompts longer
        plan = replace(plan, max_prompt_tokens=min(plan.max_prompt_tokens, window - args.max_new_tokens))
    counts: Counter[str] = Counter(read=plan.read, too_long=plan.too_long)
    while plan.batches:
        counts.update(regenerate(plan, backend, output, progress=not args.quiet))
        plan = next_turns(plan, output.answers(), backend.tokenizer, reader, check)
        check.finish(listing_of(output.path))
        counts["later"] += plan.too_long + plan.cut
    return counts


def resolve(args: argparse.Namespace) -> None:
    """Fill in missing options from the recipe, or so that prompt and answer share LONGEST tokens or the context.

    Raises:
        DataError: neither the command line nor a recipe names the target or the output, or prompts are piped.
        FsdError: the recipe is malformed.
    """
    if args.config is not None:
        recipe = read_recipe(args.config)
        answers = [path for path in recipe.data["train_files"] if path.endswith(".jsonl")]
        args.target = args.target or recipe.model["target"]
        args.target_kwargs = target_kwargs_of(recipe, args.target_kwargs)
        args.output = args.output or next(iter(answers), None)
        args.max_length = args.max_length or recipe.data["max_length"]
    for name in ("target", "output"):
        if not getattr(args, name):
            raise DataError(f"no {name} was given. Give --{name}, or a recipe with it as --config.")
    if "-" in args.prompts:
        raise DataError("--prompts -: a run that goes on reads its prompts again. Give a file.")
    length = args.max_length or min(context_of(args.target) or LONGEST, LONGEST)
    args.max_new_tokens = args.max_new_tokens or max(1, length // 2)
    args.max_prompt_tokens = args.max_prompt_tokens or max(1, length - args.max_new_tokens)


def _same_total(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two runs divide the same length of text differently between prompt and answer."""
    names = ("max_new_tokens", "max_prompt_tokens")
    old, new = ([settings[name] for name in names if isinstance(settings.get(name), int)] for settings in (before, now))
    return old != new and len(old) == len(new) == 2 and sum(old) == sum(new)


def _report_skipped(plan: PromptSchedule, args: argparse.Namespace) -> None:
    if not plan.too_long:
        return
    if plan.too_long == plan.read:
        raise DataError(
            f"all {plan.read} prompts are longer than {args.max_prompt_tokens} tokens. Raise --max-prompt-tokens, or "
            "lower --max-new-tokens, which leaves them more of --max-length."
        )
    print(
        f"{'warning: ' if 2 * plan.too_long > plan.read else ''}{plan.too_long} of {plan.read} prompts are longer than "
        f"{args.max_prompt_tokens} tokens and are skipped (--max-prompt-tokens)",
        file=sys.stderr,
    )


def _local(args: argparse.Namespace) -> LocalBackend:
    decoder = FuzzyDecoder.from_pretrained(
        args.target, args.drafter, dtype=parse_dtype(args.dtype), device=args.device, **(args.target_kwargs or {})
    )
    return LocalBackend(decoder, args.max_new_tokens, args.seed, args.features)


def _endpoint(args: argparse.Namespace) -> EndpointBackend:
    """Make the backend of a server. The target's directory needs only tokenizer and generation config."""
    directory = builtin_dir(args.target) if is_builtin(args.target) else args.target
    try:
        with guarded():
            tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        says = hub_fault(error)
        fault = f"target {args.target!r} has no tokenizer ({error}). Add its files."
        raise FsdError(fault if says is None else f"{args.target} {says}") from error
    set_control_tokens(tokenizer, bool((args.target_kwargs or {}).get("allow_control_tokens")))
    return EndpointBackend(
        args.endpoint, args.endpoint_model or args.target, tokenizer, _generation_config(directory),
        args.max_new_tokens, None if args.no_request_seeds else args.seed, args.concurrency,
        args.batch_size,
    )  # fmt: skip


def context_of(target: str) -> int | None:
    """Return the target's longest context; None if its config is missing or does not say, or there is no limit."""
    try:
        config = load_config(target)
    except FsdError:
        return None
    return max_positions(config.get_text_config(decoder=True))


def _generation_config(directory: str | Path) -> GenerationConfig | None:
    """Read the target's generation config like transformers; None without a model config."""
    try:
        return GenerationConfig.from_pretrained(directory)
    except OSError:  # without such a file, the model config has the options
        pass
    try:
        return GenerationConfig.from_model_config(load_config(directory))
    except FsdError:
        return None


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that determine the answers. Batches and drafts affect only local ones."""
    names = ["target", "max_new_tokens", "max_prompt_tokens", "temperature", "limit", "seed"]
    names.append("chat_template_args")
    settings = {name: getattr(args, name) for name in names}
    if args.raw:
        settings["raw"] = True
    settings["backend"] = "endpoint" if args.endpoint else "local"
    if args.endpoint:
        settings["endpoint_model"] = args.endpoint_model
    else:
        if args.target_kwargs:
            settings["target_kwargs"] = args.target_kwargs
        settings.update(batch_size=args.batch_size, dtype=args.dtype, rule=RULE, drafter=args.drafter)
    digests: dict[str, list[str]] = {}
    for path in args.prompts:
        digests.setdefault(Path(path).name, []).append(rows_digest(path))
    settings["prompts"] = {name: files[0] if len(files) == 1 else files for name, files in digests.items()}
    return settings
