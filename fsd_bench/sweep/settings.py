"""The options of a sweep: rules with lists of parameters, trees, temperatures, prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_bench.models import ModelOptions, Models
from fsd_bench.prompts import spread_rows
from fsd_bench.score import AUTO, check_score
from fsd_core.errors import FsdError
from fsd_core.registry import check_listed
from fsd_core.text.encoding import PromptRow
from fsd_infer.drafters import TreeShape
from fsd_infer.rules import Rule, parse_rule

EXACT = "exact"
CONTROLS = "random:0.1/0.25/0.5"  # for a sweep that names no random gate


@dataclass(frozen=True)
class Setting:
    """A rule with its parameters, and perhaps a tree.

    Attributes:
        name: ``RULE`` or ``RULE@DEPTHxWIDTHxNODES``.
        rule: the rule.
        tree: None for the run's tree.
        family: the text, shared by the settings that its lists of parameters stand for.
    """

    name: str
    rule: Rule
    tree: TreeShape | None
    family: str


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """Parse ``RULE[@DEPTHxWIDTHxNODES]``. Parameters may be lists: ``fuzzy:js:0.1/0.2/0.4``.

    Exact decoding always comes first. A setting that is named twice is measured once.

    Raises:
        FsdError: no rule besides exact, an unknown rule, an invalid parameter or tree.
    """
    settings: dict[str, Setting] = {}
    for text in (EXACT, *texts):
        rule, at, tree = text.partition("@")
        for values in itertools.product(*map(_listed, rule.split(":"))):
            rule_text = ":".join(values)
            name = rule_text + at + tree
            settings.setdefault(name, Setting(name, parse_rule(rule_text), TreeShape.parse(tree) if at else None, text))
    if len(settings) == 1:
        raise FsdError("no rule besides exact: name at least one, such as fuzzy:js:0.1/0.3.")
    return list(settings.values())


def _listed(part: str) -> list[str]:
    """Return the parameters that a list ``0.1/0.2`` or ``gate=0.1/0.2`` stands for."""
    name, equals, values = part.rpartition("=")
    return [name + equals + value for value in values.split("/")]


@dataclass
class SweepOptions(ModelOptions):
    """The options of a sweep, besides those of its models. Settings without a tree take the run's.

    Attributes:
        prompts: files of prompts, see :func:`fsd_core.text.encoding.read_prompts`.
        rules: see :func:`parse_settings`.
        temperatures: 0 is greedy.
        limit: most prompts of each file, evenly spread over it; None for all.
        max_new_tokens: new tokens per answer.
        batch_size: prompts decoded together, as a server would.
        repeats: answers per prompt at temperatures above 0, each with its own seed.
        seed: seed of draws and of the bootstrap.
        score: kind of reference, see :mod:`fsd_bench.score`.
        examples: number of prompts whose answers the report shows.
        controls: add random gates if none is named.
        raw: continue prompts without the chat template.
        strict: stop at the first row that cannot be used, instead of skipping a few.
    """

    prompts: Sequence[str | Path]
    rules: Sequence[str]
    temperatures: Sequence[float] = (0.0,)
    limit: int | None = None
    max_new_tokens: int = 128
    batch_size: int = 1
    repeats: int = 1
    seed: int = 0
    score: str = AUTO
    examples: int = 4
    controls: bool = True
    raw: bool = False
    strict: bool = False

    def settings(self) -> list[Setting]:
        """Return the settings. Raises as :func:`parse_settings`."""
        settings = parse_settings(self.rules)
        has_controls = not self.controls or any(setting.name.startswith("random") for setting in settings)
        return settings if has_controls else parse_settings([*self.rules, CONTROLS])

    def check(self) -> None:
        """Raise FsdError for options that can be refused before anything is loaded."""
        super().check()
        check_listed("prompts", self.prompts)
        check_listed("rules", self.rules)
        self.settings()
        if not self.prompts:
            raise FsdError("no file of prompts: name at least one.")
        if isinstance(self.tree, str):
            raise FsdError(f"a sweep compares rules on named trees: give a shape for tree {self.tree}, or RULE@8x2x16.")
        check_score(self.score)
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise FsdError("give at least one temperature, and none twice.")

    def read(self, output: str | Path | None = None) -> list[PromptRow]:
        """Return the prompts. Raises DataError as :func:`.spread_rows`; skipped rows are listed next to ``output``."""
        return spread_rows(self.prompts, Models(self).encoder(self.raw), self.limit, self.strict, output)

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values. ``rules`` are the settings' names."""
        names = [setting.name for setting in self.settings()]
        lists = {"prompts": [Path(file).name for file in self.prompts], "temperatures": list(self.temperatures)}
        values = {name: value for name, value in asdict(self).items() if name != "strict"}
        return {**values, **lists, "rules": names}
