"""The sweep: every setting answers every prompt at every temperature. Each answer is a line of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsd_bench.base import Comparison, MeasuredAnswer, TimedRun
from fsd_bench.engine import EngineMethod
from fsd_bench.likelihood import mean_log_likelihoods
from fsd_bench.models import Models
from fsd_bench.prompts import encode_rows, group_prompts, rows_digest, without_copies
from fsd_bench.runs import RunFile, Trial, read_lines, read_run
from fsd_bench.score import Reference, measure, read_references
from fsd_bench.sweep.settings import SweepOptions
from fsd_bench.trials import RunSpec, Session, comparisons_of, in_turns, run_trials
from fsd_core.errors import FsdError
from fsd_core.files import jsonable, misshapen, usable_name, writable
from fsd_core.text.encoding import PromptRow
from fsd_core.text.pieces import token_pieces
from fsd_infer.environment import environment


def sweep(options: SweepOptions, path: str | Path, *, progress: bool = False, rows: Sequence[PromptRow] = ()) -> Path:
    """Append the missing answers to the file at ``path``. A finished file is left unchanged.

    Args:
        options: what to run.
        path: the file, see :class:`.RunFile`. Its first line also has ``families``, ``prompts`` and ``environment``.
        progress: show a progress bar with the remaining time.
        rows: prompts in place of the options', if they were read before.

    Returns:
        The path.

    Raises:
        FsdError: invalid options, another file in the way, or whatever loading or decoding raises. Finished answers
            are kept.
    """
    options.check()
    rows = list(rows) or without_copies(options.read(path), kept=True)
    references = read_references(rows, options.score)
    settings = options.settings()
    names = [setting.name for setting in settings]
    groups = group_prompts([""] * len(rows), options.batch_size)
    trials = in_turns(names, len(groups), {value: options.repeats if value else 1 for value in options.temperatures})
    facts = {
        "families": {setting.name: setting.family for setting in settings},
        "prompts": [_described(row, reference) for row, reference in zip(rows, references, strict=True)],
        "environment": environment(),
    }
    stored_options = {**options.to_dict(), "rows_sha256": rows_digest(rows)}
    counts = {trial: len(groups[trial.group]) for trial in trials}
    file = RunFile(writable(path, "the sweep's file"), "sweep", jsonable(stored_options), counts, jsonable(facts))
    assert file.path is not None
    if len(file.runs) < len(trials) or not file.described.keys() >= set(names):
        with file.kept():
            _run(options, rows, references, trials, file, progress)
    return file.path


def _described(row: PromptRow, reference: Reference | None) -> dict[str, Any]:
    return {
        "id": row.id,
        "where": f"{row.file}:{row.line}",
        "source": str(row.row.get("category") or row.source),
        "text": row.messages[-1]["content"],
        "reference": None if reference is None else str(reference.value),
    }


def _run(
    options: SweepOptions,
    rows: Sequence[PromptRow],
    references: Sequence[Reference | None],
    trials: Sequence[Trial],
    file: RunFile,
    progress: bool,
) -> None:
    models = Models(options)
    models.first_drafter = options.drafter
    decoder, settings = models.decoder, options.settings()
    prompts = encode_rows(rows, models.encoder(options.raw))
    groups = group_prompts([""] * len(rows), options.batch_size)
    spec = RunSpec(
        lambda trial, runs: [prompts[index] for index in groups[trial.group]], options.max_new_tokens, options.seed
    )

    def start() -> list[EngineMethod]:
        return [EngineMethod(s.name, decoder, s.rule, models.load(None, s.tree), traced=True) for s in settings]

    def finish(trial: Trial, run: TimedRun) -> None:
        for index, answer in zip(groups[trial.group], run.answers, strict=True):
            measure(answer, decoder.tokenizer, prompts[index], rows[index], references[index])
            if answer.trace is not None and answer.tokens is not None and index < options.examples:
                answer.trace.pieces = token_pieces(decoder.tokenizer, answer.tokens)
        pairs = [(prompts[i], answer.tokens) for i, answer in zip(groups[trial.group], run.answers) if answer.tokens]
        answered = (answer for answer in run.answers if answer.tokens)
        for answer, log_likelihood in zip(answered, mean_log_likelihoods(decoder.target, pairs), strict=True):
            answer.log_likelihood = log_likelihood

    session = Session([setting.name for setting in settings], start, trials)
    run_trials([session], spec, file, finish, title="sweep", progress=progress)


@dataclass
class TemperatureRuns:
    """One temperature: what every setting answered."""

    temperature: float
    comparisons: list[Comparison]

    def answers(self, name: str) -> list[MeasuredAnswer]:
        """Return a setting's answers."""
        return [answer for comparison in self.comparisons for answer in comparison.runs[name].answers]


@dataclass
class Sweep:
    """A sweep's file."""

    head: dict[str, Any]
    at: list[TemperatureRuns]

    @property
    def settings(self) -> list[str]:
        """Names, exact first."""
        return list(self.head["settings"]["rules"])


def read_sweep(path: str | Path) -> Sweep:
    """Read the file, finished or not, without the prompts that some setting has not answered yet.

    Raises:
        FsdError: the file holds no sweep, or is damaged.
    """
    file = Path(usable_name(path, "the sweep's file"))
    lines = read_lines(file, "sweep")
    if lines is None:
        raise FsdError(f"{path} holds no sweep: name the file of `fsd-bench sweep`.")
    with misshapen(file, "Repeat the sweep, which measures the lost answers."):
        head, settings = lines[0], lines[0]["settings"]
        runs = dict(read_run(line) for line in lines[1:] if "run" in line)
        groups = group_prompts([""] * len(head["prompts"]), settings.get("batch_size", 1))
        temperatures, rules = settings["temperatures"], settings["rules"]
        at = [TemperatureRuns(value, comparisons_of(runs, groups, rules, value)) for value in temperatures]
    return Sweep(head, at)
