"""The runner of bench, sweep and calibrate: methods answer trial by trial, and finished trials are not repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from fsd_bench.base import Comparison, Method, TimedRun
from fsd_bench.runs import RunFile, Trial
from fsd_infer.request.options import at_temperature

WARMUP_TOKENS = 16
_T = TypeVar("_T")


@dataclass(frozen=True)
class Session:
    """Names of methods that are in memory together, and their trials in order. ``start`` makes the methods."""

    names: Sequence[str]
    start: Callable[[], Sequence[Method]]
    trials: Sequence[Trial]


@dataclass(frozen=True)
class RunSpec:
    """The request to every method.

    Attributes:
        prompts: returns the token ids of the prompts of a trial, which may continue answers of earlier ``runs``.
        max_new_tokens: new tokens per answer.
        seed: with group and repeat it determines the seed of a run.
        warmup: each method first gives a short answer that is not counted.
    """

    prompts: Callable[[Trial, Mapping[Trial, TimedRun]], list[list[int]]]
    max_new_tokens: int
    seed: int = 0
    warmup: bool = True

    def answer(self, method: Method, trial: Trial, runs: Mapping[Trial, TimedRun], most: int | None = None) -> TimedRun:
        """Return one run, of at most ``most`` tokens."""
        options = decoding(trial.temperature, min(self.max_new_tokens, most or self.max_new_tokens))
        return method.answer(self.prompts(trial, runs), options, self.seed + 1000 * trial.group + trial.repeat)


def decoding(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return the arguments of ``generate``, the same for every method.

    Nothing but temperature and rule shapes the distribution, whatever the model's generation config says.
    """
    neutral = dict(top_p=None, top_k=None, min_p=None, repetition_penalty=1.0)
    return {"max_new_tokens": max_new_tokens, **at_temperature(temperature), **neutral}


def in_turns(names: Sequence[str], groups: int, repeats: Mapping[float, int]) -> list[Trial]:
    """Return trials in which every method answers every group, ``repeats`` times at each temperature.

    The method that goes first rotates, so that other load on the machine disturbs all methods alike.
    """
    return [
        Trial(name, group, repeat, temperature)
        for group in range(groups)
        for temperature, count in repeats.items()
        for repeat in range(count)
        for name in rotated(names, group + repeat)
    ]


def rotated(items: Sequence[_T], by: int) -> list[_T]:
    """Return the items rotated by ``by`` places."""
    first = by % len(items)
    return [*items[first:], *items[:first]]


def run_trials(
    sessions: Sequence[Session],
    spec: RunSpec,
    file: RunFile,
    finish: Callable[[Trial, TimedRun], None] | None = None,
    *,
    title: str,
    progress: bool = False,
) -> None:
    """Run the trials that the file lacks, session by session. Methods are closed at the end of their session.

    Args:
        sessions: sessions without common trials.
        spec: prompts and options.
        file: receives the runs and the descriptions of their methods.
        finish: called with each run before it is kept.
        title: title of the progress bar.
        progress: show a progress bar with the remaining time.
    """
    total = sum(len(session.trials) for session in sessions)
    with tqdm(total=total, initial=len(file.runs), desc=title, unit="run", disable=not progress, smoothing=0.05) as bar:
        for session in sessions:
            missing = [trial for trial in session.trials if trial not in file.runs]
            if not missing and file.described.keys() >= set(session.names):
                continue
            with ExitStack() as stack:
                methods = {method.name: method for method in session.start()}
                for method in methods.values():
                    stack.callback(method.close)
                    if spec.warmup and missing:  # one-time compilation and allocation are not timed
                        spec.answer(method, missing[0], file.runs, WARMUP_TOKENS)
                for trial in missing:
                    bar.set_postfix_str(trial.method, refresh=False)
                    run = spec.answer(methods[trial.method], trial, file.runs)
                    if finish is not None:
                        finish(trial, run)
                    file.add(trial, run)
                    bar.update()
                for name, method in methods.items():
                    if name not in file.described:
                        file.describe(name, method.describe())


def comparisons_of(
    runs: Mapping[Trial, TimedRun], groups: Sequence[list[int]], names: Sequence[str], temperature: float
) -> list[Comparison]:
    """Return the comparisons at a temperature: the groups and repeats that every method has answered.

    Args:
        runs: runs by trial.
        groups: indices of each group's prompts.
        names: names of the methods.
        temperature: temperature of the trials.
    """
    by_group: dict[tuple[int, int], dict[str, TimedRun]] = {}
    for trial, run in runs.items():
        if trial.temperature == temperature:
            by_group.setdefault((trial.group, trial.repeat), {})[trial.method] = run
    return [
        Comparison(group, repeat, groups[group], {name: by_group[group, repeat][name] for name in names})
        for group, repeat in sorted(by_group)
        if by_group[group, repeat].keys() >= set(names)
    ]
