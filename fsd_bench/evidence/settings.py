"""What a sweep runs: rules with lists of parameters, trees, temperatures, prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_bench.models import ModelOptions
from fsd_bench.score import AUTO, check_score
from fsd_infer.chat.encoding import PromptRow, read_prompts
from fsd_infer.drafters import TreeShape
from fsd_infer.errors import DataError, FsdError
from fsd_infer.rules import Rule, parse_rule

EXACT = "exact"
CONTROLS = "random:0.1/0.25/0.5"  # of a sweep that names no random gate


@dataclass(frozen=True)
class Setting:
    """One thing that is measured.

    Attributes:
        name: ``RULE`` or ``RULE@DEPTHxWIDTHxNODES``.
        rule: without the tree.
        tree: None for the run's.
        family: what it shares with settings that came from the same list of parameters.
    """

    name: str
    rule: Rule
    tree: TreeShape | None
    family: str


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Settings of ``RULE[@DEPTHxWIDTHxNODES]`` where parameters may be lists: ``fuzzy:js:0.1/0.2/0.4``.

    Exact decoding comes first whether it is named or not. A setting that is named twice is measured once.

    Raises:
        FsdError: no rule, an unknown rule, a parameter or a tree that makes no sense.
    """
    settings: dict[str, Setting] = {}
    for text in (EXACT, *texts):
        rule, at, tree = text.partition("@")
        for values in itertools.product(*map(_listed, rule.split(":"))):
            one = ":".join(values)
            name = one + at + tree
            settings.setdefault(name, Setting(name, parse_rule(one), TreeShape.parse(tree) if at else None, text))
    if len(settings) == 1:
        raise FsdError("no rule besides exact: name at least one, such as fuzzy:js:0.1/0.3.")
    return list(settings.values())


def _listed(part: str) -> list[str]:
    """The parameters that a list stands for, ``0.1/0.2`` or ``gate=0.1/0.2``."""
    name, equals, values = part.rpartition("=")
    return [name + equals + value for value in values.split("/")]


@dataclass
class SweepOptions(ModelOptions):
    """The options of a sweep, beside those of its models; the tree is that of settings without one of their own.

    Attributes:
        prompts: files of prompts, see :func:`fsd_infer.chat.encoding.read_prompts`.
        rules: see :func:`parse_settings`.
        temperatures: 0 is greedy.
        limit: at most so many prompts of each file, evenly spread over it; None for all.
        max_new_tokens: of each answer.
        repeats: answers per prompt at temperatures above 0, with a seed each.
        seed: of draws and of the bootstrap.
        score: kind of reference, see :mod:`fsd_bench.score`.
        examples: prompts whose answers the report shows.
        controls: add random gates where none is named.
        raw: continue prompts as they are, without the chat template.
    """

    prompts: Sequence[str | Path]
    rules: Sequence[str]
    temperatures: Sequence[float] = (0.0,)
    limit: int | None = None
    max_new_tokens: int = 128
    repeats: int = 1
    seed: int = 0
    score: str = AUTO
    examples: int = 4
    controls: bool = True
    raw: bool = False

    def settings(self) -> list[Setting]:
        """Errors as of :func:`parse_settings`."""
        known = not self.controls or any(text.startswith("random") for text in self.rules)
        return parse_settings(self.rules if known else [*self.rules, CONTROLS])

    def check(self) -> None:
        """Raises FsdError for what can be refused before anything is loaded."""
        super().check()
        self.settings()
        if isinstance(self.tree, str):
            raise FsdError(f"a sweep compares rules on named trees: give a shape for tree {self.tree}, or RULE@8x2x16.")
        check_score(self.score)
        if not self.temperatures or not all(0 <= value < math.inf for value in self.temperatures):
            raise FsdError(f"temperatures must be 0 or above and finite, got {list(self.temperatures)}.")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise FsdError("a temperature is given twice.")

    def read(self) -> list[PromptRow]:
        """The prompts. Raises DataError for a malformed row, or a file without prompts."""
        chosen = []
        for file in self.prompts:
            rows = list(read_prompts(file))
            if not rows:
                raise DataError(f"{file}: no prompts. Give a file with at least one row.")
            count = min(self.limit or len(rows), len(rows))
            chosen += [rows[index * len(rows) // count] for index in range(count)]
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; ``rules`` are the settings' names."""
        names = [setting.name for setting in self.settings()]
        lists = {"prompts": [Path(file).name for file in self.prompts], "temperatures": list(self.temperatures)}
        return {**asdict(self), **lists, "rules": names}
