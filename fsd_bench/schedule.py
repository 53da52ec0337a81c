"""Who answers when: methods take turns prompt by prompt in one process, or block by block in processes of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

from tqdm import tqdm

from fsd_bench.base import Method, TimedRun, Turn
from fsd_bench.methods import METHODS, Spec
from fsd_bench.models import Models
from fsd_bench.partial import PartialFile
from fsd_bench.process import ProcessMethod
from fsd_bench.record import BenchPrompt, merge_turns
from fsd_bench.settings import Settings

WARMUP_TOKENS = 16
_T = TypeVar("_T")


def group_prompts(prompts: Sequence[BenchPrompt], size: int) -> list[list[int]]:
    """Indices of the prompts in batches of ``size`` (fewer at a category's end), each within one category."""
    if size == 1:
        return [[index] for index in range(len(prompts))]
    by_category: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_category.setdefault(prompt.category, []).append(index)
    return [indices[i : i + size] for indices in by_category.values() for i in range(0, len(indices), size)]


def generate_options(settings: Settings) -> dict[str, Any]:
    """Arguments of ``generate``, the same for every method."""
    if settings.temperature == 0:
        return dict(max_new_tokens=settings.max_new_tokens, do_sample=False, temperature=None, top_p=None, top_k=None)
    return dict(max_new_tokens=settings.max_new_tokens, do_sample=True, temperature=settings.temperature)


class _Turns:
    """Finished turns, as they come and from an earlier run, and the progress bar."""

    def __init__(
        self, settings: Settings, prompts: Sequence[BenchPrompt], partial: PartialFile | None, progress: bool
    ) -> None:
        self.settings, self.partial, self.progress = settings, partial, progress
        self.prompts = [prompt.ids for prompt in prompts]
        self.groups = group_prompts(prompts, settings.batch_size)
        self.options = generate_options(settings)
        self.places = [(group, repeat) for group in range(len(self.groups)) for repeat in range(settings.repeat)]
        self.finished = [turn for turn in (partial.turns if partial is not None else []) if self._is_ours(turn)]

    def _is_ours(self, turn: Turn) -> bool:
        """Is it a place of this run, with an answer to each of its prompts?"""
        if (turn.group, turn.repeat) not in self.places or turn.prompts != self.groups[turn.group]:
            return False
        return all(len(run.answers) == len(turn.prompts) for run in turn.runs.values())

    def done(self) -> set[tuple[int, int, str]]:
        """(group, repeat, method) of what is finished."""
        return {(turn.group, turn.repeat, name) for turn in self.finished for name in turn.runs}

    def bar(self, methods: int) -> tqdm:
        return tqdm(
            total=methods * len(self.places), initial=len(self.done()), desc="bench", unit="run",
            disable=not self.progress, smoothing=0.05,
        )  # fmt: skip

    def warm_up(self, method: Method, group: int) -> None:
        """One short answer that is not counted."""
        if self.settings.warmup:
            options = {**self.options, "max_new_tokens": min(self.settings.max_new_tokens, WARMUP_TOKENS)}
            method.answer([self.prompts[i] for i in self.groups[group]], options, self.settings.seed)

    def answer(self, method: Method, group: int, repeat: int) -> TimedRun:
        seed = self.settings.seed + 1000 * group + repeat
        return method.answer([self.prompts[i] for i in self.groups[group]], self.options, seed)

    def add(self, group: int, repeat: int, runs: dict[str, TimedRun]) -> None:
        turn = Turn(group, repeat, self.groups[group], runs)
        if self.partial is not None:
            self.partial.add(turn)
        self.finished.append(turn)


def take_turns(
    settings: Settings,
    methods: Sequence[Method],
    prompts: Sequence[BenchPrompt],
    partial: PartialFile | None,
    progress: bool = False,
) -> list[Turn]:
    """Every method answers every prompt; which goes first rotates. Turns that ``partial`` holds are not repeated."""
    turns = _Turns(settings, prompts, partial, progress)
    names = {method.name for method in methods}
    done = {(turn.group, turn.repeat): turn for turn in turns.finished if turn.runs.keys() == names}
    turns.finished = list(done.values())
    todo = [place for place in turns.places if place not in done]
    if todo:
        for method in tqdm(methods, desc="warm-up", unit="method", disable=not progress, leave=False):
            turns.warm_up(method, 0)
    with turns.bar(len(methods)) as bar:
        for group, repeat in todo:
            runs = {}
            for method in _rotated(methods, group + repeat):
                runs[method.name] = turns.answer(method, group, repeat)
                bar.set_postfix_str(method.name, refresh=False)
                bar.update()
            turns.add(group, repeat, runs)
    return merge_turns(turns.finished)


def take_blocks(
    settings: Settings,
    specs: Sequence[Spec],
    prompts: Sequence[BenchPrompt],
    blocks: Mapping[int, int],
    partial: PartialFile | None,
    progress: bool = False,
) -> tuple[list[Turn], dict[str, dict[str, Any]]]:
    """Every method answers every block in a process of its own, one process at a time; which goes first rotates.

    Args:
        settings, prompts, partial, progress: as in :func:`take_turns`.
        specs: the methods.
        blocks: block of each group of prompts.

    Returns:
        The turns, and the description of each method.
    """
    turns = _Turns(settings, prompts, partial, progress)
    described = dict(partial.described) if partial is not None else {}
    done = turns.done()
    with turns.bar(len(specs)) as bar:
        for block in sorted(set(blocks.values())):
            for spec in _rotated(specs, block):
                places = [place for place in turns.places if blocks[place[0]] == block]
                todo = [place for place in places if (*place, spec.name) not in done]
                if not todo and spec.name in described:
                    continue
                bar.set_postfix_str(spec.name)
                with closing(_start(settings, spec)) as method:
                    turns.warm_up(method, places[0][0])
                    for group, repeat in todo:
                        turns.add(group, repeat, {spec.name: turns.answer(method, group, repeat)})
                        bar.update()
                    if spec.name not in described:
                        described[spec.name] = method.describe()
                        if partial is not None:
                            partial.describe(spec.name, described[spec.name])
    return merge_turns(turns.finished), {spec.name: described[spec.name] for spec in specs}


def _start(settings: Settings, spec: Spec) -> Method:
    """A method in a process of its own."""
    if spec.kind in METHODS and METHODS.get(spec.kind).own_process:
        return METHODS.get(spec.kind).make(spec, Models(settings))
    values = json.dumps({**settings.to_dict(), "isolate": None})
    return ProcessMethod(spec.name, [sys.executable, "-m", "fsd_bench.worker", values, spec.text])


def _rotated(things: Sequence[_T], by: int) -> list[_T]:
    first = by % len(things)
    return [*things[first:], *things[:first]]
