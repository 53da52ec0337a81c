"""`fsd-train label`: which tokens of the target's answers matter, found by changing them.

Each prompt is answered twice: exactly, and by :class:`.semi_greedy.SemiGreedy`, where the target goes on after every
change that a draft proposes and the outcome decides whether it stays. The output is JSONL, a line per prompt, resumable
as that of `fsd-train regenerate`::

    {"id", "source", "reference", "exact": ANSWER, "searched": ANSWER, "changes": [CHANGE, ...]}
    ANSWER  {"ids", "forwards", "score", "final", "copied", "repeated"}
    CHANGE  {"before", "token", "choice", "regret", "important", "score", "final", "loss", "returned", "copied",
             "repeated"}

``forwards`` are verifying forwards of the target; ``final`` is what an answer says in the end; ``copied`` and
``repeated`` are shares of its 4-grams. Of a change, ``before`` are the ids of the answer that precede it, ``regret`` is
in nats, the measures are those of the answer that the target gave after it, and ``loss`` and ``returned`` need no
score: how much less likely the rest of the answer without the change is after it, in nats per token, and the share of
that rest in which the changed answer ends.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fsd_bench.likelihood import log_likelihoods
from fsd_bench.measures import final_answer
from fsd_bench.score import Reference, read_references
from fsd_infer.chat.encoding import encode_chat, read_prompts
from fsd_infer.chat.rows import rows_digest
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.drafters import TreeShape
from fsd_infer.engine import Outcome, Request, decode
from fsd_infer.engine.ngrams import copied_ngrams, repeated_ngrams
from fsd_infer.errors import ContextLengthError, DataError, FsdError
from fsd_infer.rules import Rule, parse_rule
from fsd_infer.targets.loading import parse_dtype
from fsd_infer.targets.token_ids import eos_ids
from fsd_train import command_lines
from fsd_train.regenerate import AnswerFile
from fsd_train.semi_greedy import Change, SemiGreedy

SCORE, LOSS = "score", "loss"  # what decides whether a change is important


@dataclass(frozen=True)
class Known:
    """An answer, of which ``ids[start:]`` is what the target said by itself, with its log-probabilities."""

    ids: list[int]
    start: int
    log_p: list[float]


@dataclass
class Task:
    """A prompt to be labelled.

    Attributes:
        reference: None where its answers cannot be scored.
        known: the exact answer, and those after harmless changes.
        changes: lines of the changes so far.
    """

    id: str
    source: str
    prompt: list[int]
    reference: Reference | None
    known: list[Known] = field(default_factory=list)
    exact: dict[str, Any] = field(default_factory=dict)
    changes: list[dict[str, Any]] = field(default_factory=list)


def read_tasks(
    paths: Sequence[str | Path], tokenizer: Any, score: str, limit_per_file: int | None = None, seed: int = 0
) -> list[Task]:
    """The prompts of the files, of each a random sample. Raises DataError for a malformed row, or none at all."""
    tasks = []
    for path in paths:
        rows = list(read_prompts(path))
        if limit_per_file is not None and limit_per_file < len(rows):
            rows = random.Random(seed).sample(rows, limit_per_file)
        tasks += [
            Task(row.id, row.source, encode_chat(tokenizer, row.messages), reference)
            for row, reference in zip(rows, read_references(rows, score), strict=True)
        ]
    if not tasks:
        raise DataError(f"{', '.join(map(str, paths))}: no prompts. Give a file with at least one row.")
    return tasks


class Labeller:
    """Labels batches of tasks.

    Args:
        decoder: the target with its tokenizer, and the drafter whose drafts are tried.
        max_new_tokens: of each answer.
        by: "score": a change is important if the score of the answer falls, or if it says something else in the end (a
            number, an option). "loss": if the rest of the answer loses more than ``most_loss`` nats per token.
        most_regret: changes that cost more nats are not tried.
        most_loss: see ``by``.
    """

    def __init__(
        self,
        decoder: FuzzyDecoder,
        max_new_tokens: int,
        by: str = SCORE,
        most_regret: float = 6.0,
        most_loss: float = 0.5,
    ) -> None:
        if by not in (SCORE, LOSS):
            raise FsdError(f"changes are judged by {SCORE} or by {LOSS}, not by {by!r}.")
        for name, value in (("most_regret", most_regret), ("most_loss", most_loss)):
            if not value >= 0:
                raise FsdError(f"{name} must be at least 0 nats, got {value}.")
        if decoder.tokenizer is None:
            raise FsdError(f"target {decoder.target.name} has no tokenizer: add its tokenizer files, prompts are text.")
        self.decoder, self.tokenizer = decoder, decoder.tokenizer
        self.max_new_tokens, self.by, self.most_regret, self.most_loss = max_new_tokens, by, most_regret, most_loss
        self.ends = frozenset(eos_ids(decoder.target.model.generation_config)) | {self.tokenizer.eos_token_id}
        self._tasks: Sequence[Task] = ()

    def label(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """The lines of these tasks, which are answered together. Raises DataError for a task that cannot be scored."""
        for task in tasks:
            if self.by == SCORE and task.reference is None:
                raise DataError(f"prompt {task.id} of {task.source} has no reference to score by: give --by {LOSS}.")
        self._tasks = tasks
        exact = self.decode([task.prompt for task in tasks], parse_rule("exact"))
        for task, ids, record, row in zip(tasks, exact.sequences, exact.records, exact.stats.rows, strict=True):
            task.known, task.changes = [Known(ids, 0, record.log_likelihoods)], []
            task.exact = {"ids": ids, "forwards": row.target_forwards, **self.measures(task, ids)}
        rule = SemiGreedy(self.harmless, self.ends, self.most_regret)
        searched = self.decode([task.prompt for task in tasks], rule)
        return [
            {
                "id": task.id,
                "source": task.source,
                "reference": None if task.reference is None else str(task.reference.value),
                "exact": task.exact,
                "searched": {"ids": ids, "forwards": row.target_forwards, **self.measures(task, ids)},
                "changes": task.changes,
            }
            for task, ids, row in zip(tasks, searched.sequences, searched.stats.rows, strict=True)
        ]

    def decode(self, prompts: list[list[int]], rule: Rule, limit: int | None = None, seed: int = 0) -> Outcome:
        """Greedy answers of at most ``limit`` tokens; nothing but the rule, and its coins by the seed, shapes them."""
        coins = torch.Generator(self.decoder.target.device).manual_seed(seed)
        request = Request(
            prompts, limit or self.max_new_tokens, eos_token_ids=self.ends, generator=coins, measure_log_likelihood=True
        )
        return decode(self.decoder.target, self.decoder.drafter, rule, request)

    def harmless(self, changes: Sequence[Change]) -> list[bool]:
        """Let the target go on after each change, and compare. Notes the changes in their tasks.

        A change beyond the limit of the answer's length changes nothing, and is none.
        """
        tasks = [self._task_of(change) for change in changes]
        within = [len(change.text) - len(task.prompt) <= self.max_new_tokens for task, change in zip(tasks, changes)]
        if not all(within):
            found = iter(self.harmless([change for change, inside in zip(changes, within) if inside]))
            return [inside and next(found) for inside in within]
        answers = [Known(ids := change.text[len(task.prompt) :], len(ids), []) for task, change in zip(tasks, changes)]
        going = [n for n, one in enumerate(answers) if one.ids[-1] not in self.ends and one.start < self.max_new_tokens]
        if going:
            most = max(self.max_new_tokens - answers[number].start for number in going)
            made = self.decode([changes[number].text for number in going], parse_rule("exact"), most)
            for number, more, record in zip(going, made.sequences, made.records, strict=True):
                one = answers[number]
                ids = [*one.ids, *more][: self.max_new_tokens]
                answers[number] = Known(ids, one.start, record.log_likelihoods[: len(ids) - one.start])
        rests = [self._rest(task, change) for task, change in zip(tasks, changes)]
        losses = self._losses(changes, rests)
        verdicts = []
        for task, change, answer, (rest, _), loss in zip(tasks, changes, answers, rests, losses, strict=True):
            measures = self.measures(task, answer.ids)
            if self.by == LOSS:
                important = loss is None or loss > self.most_loss
            else:
                important = measures["score"] < task.exact["score"] or measures["final"] != task.exact["final"]
            if not important:
                task.known.append(answer)
            before = change.text[len(task.prompt) : -1]
            task.changes.append(
                {
                    "before": before,
                    "token": change.text[-1],
                    "choice": change.choice,
                    "regret": round(change.regret, 4),
                    "important": important,
                    "loss": loss,
                    "returned": _returned(answer.ids[answer.start :], rest),
                    **measures,
                }
            )
            verdicts.append(not important)
        return verdicts

    def _task_of(self, change: Change) -> Task:
        return next(task for task in self._tasks if change.text[: len(task.prompt)] == task.prompt)

    def _rest(self, task: Task, change: Change) -> tuple[list[int], float]:
        """What the target says by itself after the choice that the change displaced, and its log-probability; no tokens
        where it is not known, or nothing."""
        place = len(change.text) - 1 - len(task.prompt)
        before = [*change.text[len(task.prompt) : -1], change.choice]
        for known in task.known:
            if known.start <= place and known.ids[: place + 1] == before:
                return known.ids[place + 1 :], sum(known.log_p[place + 1 - known.start :])
        return [], 0.0

    def _losses(self, changes: Sequence[Change], rests: Sequence[tuple[list[int], float]]) -> list[float | None]:
        """Nats per token by which each rest is less likely after its change; None where there is no rest."""
        pairs = [(change.text, rest) for change, (rest, _) in zip(changes, rests) if rest]
        after = iter(log_likelihoods(self.decoder.target, pairs) if pairs else [])
        return [round((log_p - next(after)[0]) / len(rest), 4) if rest else None for rest, log_p in rests]

    def measures(self, task: Task, ids: list[int]) -> dict[str, Any]:
        """``score`` and ``final`` where the task has such, ``copied`` and ``repeated``."""
        text, reference = self.tokenizer.decode(ids, skip_special_tokens=True), task.reference
        says = reference is not None and reference.kind in ("number", "choice")
        return {
            "score": None if reference is None else reference.score(text),
            "final": final_answer(text, reference.options) if says and reference is not None else None,
            "copied": _rounded(copied_ngrams(task.prompt, ids)),
            "repeated": _rounded(repeated_ngrams(ids)),
        }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _returned(answer: Sequence[int], rest: Sequence[int]) -> float | None:
    """Share of ``rest`` in which the answer ends; None if there is no rest."""
    same = 0
    for own, other in zip(reversed(answer), reversed(rest)):
        if own != other:
            break
        same += 1
    return round(same / len(rest), 4) if rest else None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Raises FsdError for bad input."""
    args = command_lines.label().parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    decoder = FuzzyDecoder.from_pretrained(
        args.target, args.drafter, dtype=parse_dtype(args.dtype), device=args.device, tree=TreeShape.parse(args.tree)
    )
    labeller = Labeller(decoder, args.max_new_tokens, args.by, args.most_regret, args.most_loss)
    tasks = read_tasks(args.prompts, decoder.tokenizer, args.score, args.limit_per_file, args.seed)
    longest, window = max(len(task.prompt) for task in tasks), decoder.target.max_positions
    if window is not None and longest + args.max_new_tokens > window:
        raise ContextLengthError(
            f"a prompt of {longest} tokens and {args.max_new_tokens} new ones exceed the target's context of {window}. "
            "Remove it, or lower --max-new-tokens."
        )
    names = ["target", "drafter", "dtype", "tree", "by", "most_regret", "most_loss", "score", "max_new_tokens"]
    settings = {name: getattr(args, name) for name in [*names, "limit_per_file", "seed", "batch_size"]}
    settings["prompts"] = {Path(path).name: rows_digest(path) for path in args.prompts}
    batches = [tasks[start : start + args.batch_size] for start in range(0, len(tasks), args.batch_size)]
    output, counts = AnswerFile(args.output, settings), {"changes": 0, "important": 0}
    with output.open() as (done, file):
        kept = sum(task.id in done for task in tasks)
        with tqdm(total=len(tasks), initial=kept, unit="prompt", disable=args.quiet, smoothing=0.1) as bar:
            for batch in batches:
                if all(task.id in done for task in batch):
                    continue
                # whole also where a torn line left only some of it to be done: drafts and rounding depend on the batch
                rows = [row for row in labeller.label(batch) if row["id"] not in done]
                output.append(file, [(json.dumps(row) + "\n").encode() for row in rows])
                for change in (change for row in rows for change in row["changes"]):
                    counts["changes"] += 1
                    counts["important"] += change["important"]
                bar.update(len(rows))
                bar.set_postfix(counts)
    print(f"{args.output}: {len(tasks)} prompts, {kept} kept from earlier runs; {counts['changes']} changes tried, ")
    print(f"{counts['important']} of them important")
    return 0


if __name__ == "__main__":
    sys.exit(main())
