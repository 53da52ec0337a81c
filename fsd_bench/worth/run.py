"""``fsd-bench worth``: load models and prompts by name, forecast, and print tables and a recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsd_bench.models import ModelOptions
from fsd_bench.prompts import Encoder, encode_rows, spread_rows, without_copies
from fsd_bench.worth.forecasts import forecast
from fsd_bench.worth.result import COSTS, Forecast, ForecastRow
from fsd_core.errors import FsdError
from fsd_core.registry import check_listed
from fsd_core.tables import number, percent, table
from fsd_infer.decoder import FuzzyDecoder
from fsd_infer.engine.first_choices import drafts_text
from fsd_infer.environment import environment
from fsd_infer.rules import parse_rule
from fsd_infer.trees.shape import TreeShape


@dataclass(kw_only=True)
class WorthOptions(ModelOptions):
    """The options of a forecast, besides those of its models. ``tree`` is decoded with, and cut.

    Attributes:
        prompts: file of prompts, see :func:`fsd_core.text.encoding.read_prompts`.
        rules: rules besides the usual ones.
        temperature: 0 is greedy.
        limit: most prompts, evenly spread; None for all.
        max_new_tokens: new tokens per answer.
        raw: continue prompts without the chat template.
        seed: seed of draws.
        strict: stop at the first row that cannot be used, instead of skipping a few.
    """

    prompts: str | Path
    rules: Sequence[str] = ()
    temperature: float = 0.0
    limit: int | None = 16
    max_new_tokens: int = 96
    raw: bool = False
    seed: int = 0
    strict: bool = False

    def check(self) -> None:
        """Raise FsdError for options that can be refused before anything is loaded."""
        super().check()
        check_listed("rules", self.rules)
        if isinstance(self.tree, str):
            raise FsdError(f"worth decodes with a named tree and cuts it: give a shape for tree {self.tree}.")
        for rule in self.rules:
            parse_rule(rule)

    def encoded(self, decoder: FuzzyDecoder) -> list[list[int]]:
        """Return the prompts' token ids. Raises DataError for a malformed row, or a file without prompts."""
        encode = Encoder.of(decoder, self.raw)
        rows = spread_rows([self.prompts], encode, self.limit, self.strict)
        return encode_rows(without_copies(rows, kept=True), encode)


def worth(
    options: WorthOptions, *, progress: bool = False, kept: Path | None = None
) -> tuple[Forecast, dict[str, Any]]:
    """Return the forecast and its record. ``kept`` as for :func:`.forecast`. Raises as that, or as loading."""
    options.check()
    decoder = options.load(options.drafter)
    result = forecast(
        decoder, options.encoded(decoder), options.rules, temperature=options.temperature,
        max_new_tokens=options.max_new_tokens, seed=options.seed, progress=progress, kept=kept,
    )  # fmt: skip
    described = {**asdict(options), "prompts": Path(options.prompts).name}
    return result, {"options": described, "forecast": result.to_dict(), "environment": environment()}


# a recommended rule's largest cost in nats per token, and its least speed relative to exact
MAX_NATS, MIN_SPEED = 0.1, 1.1


def shape_name(shape: TreeShape) -> str:
    """ "chain 8", "chain 8,0.3" with ``stop_below``, or "tree 5,4,12"."""
    if shape.width == 1:
        return f"chain {shape.depth}" + (f",{shape.stop_below:g}" if shape.stop_below else "")
    return f"tree {shape.depth},{shape.width},{shape.nodes}"


def worth_text(result: Forecast) -> str:
    """Return the whole text."""
    parts = [_rules_table(result), _costs_table(result), f"drafter: {drafts_text(result.drafts)}"]
    if result.temperature == 0:
        spent = ", ".join(f"{nats:.2f} at temperature {t}" for t, nats in result.yardsticks.items())
        parts.append(f"yardstick, nats per token that the target's own samples spend: {spent}")
    parts += [text] if (text := _scores_text(result)) else []
    return "\n\n".join([*parts, verdict(result)])


def brief_text(result: Forecast, options: WorthOptions) -> str:
    """Return the recommendation with the command that follows it."""
    row, words = recommended(result), ["fsd-infer", "generate"]
    for name in ("target", "drafter"):
        if value := getattr(options, name):
            words += [f"--{name}", value]
    if row is not None:
        shape = row.best.shape
        words += ["--rule", row.rule, "--tree", f"{shape.depth},{shape.width},{shape.nodes}"]
        words[-1] += f",{shape.stop_below:g}" if shape.stop_below else ""
    command = " ".join(shlex.quote(str(word)) for word in words)
    source = f"forecast from {result.rounds} rounds of exact; --details prints it for each rule"
    return f"{verdict(result)}\n\n  {command} --prompt '...'\n\n({source})"


def _scores_text(result: Forecast) -> str:
    """Return what was measured of the rules' scores with other prompts, which nats do not tell; "" for nothing."""
    rules = {type(rule): rule for rule in (parse_rule(row.rule) for row in result.rows)}
    lines = [f"{rule.name}: {rule.measured}" for rule in rules.values() if rule.measured]
    return "\n".join(["scores, measured elsewhere; of other rules nothing is known", *lines]) if lines else ""


def _rules_table(result: Forecast) -> str:
    headers = ["rule", "shape", "tau", "x tokens", "x speed", "nats/token", "lossy %"]
    rows = [
        [row.rule, shape_name(row.best.shape), number(row.best.tau), number(row.tokens), number(row.speed)]
        + [number(row.best.nats, 3), percent(row.best.lossy, 1)]
        for row in result.rows
    ]
    note = f"forecast from {result.rounds} rounds of exact with {shape_name(result.decoded)}, "
    note += f"whose tau is {result.tau:.2f}\neach rule on the shape that is fastest here; x: times exact on its own"
    return table(headers, rows) + "\n" + note


def _costs_table(result: Forecast) -> str:
    rows = [[row.rule, *(number(row.per_cost(cost)) for cost in COSTS)] for row in [result.exact, *result.frontier()]]
    note = "c: cost of a drafted token in target forwards, nodes free as on a GPU; each on its best shape"
    return table(["tokens per cost", *(f"c = {cost:g}" for cost in COSTS)], rows) + "\n" + note


def recommended(result: Forecast) -> ForecastRow | None:
    """Return the fastest rule below :data:`MAX_NATS`, or None if it gains too little."""
    rows = [row for row in result.frontier(MAX_NATS) if row.speed >= MIN_SPEED]
    return rows[-1] if rows else None


def verdict(result: Forecast) -> str:
    """Return the recommendation."""
    row = recommended(result)
    if row is not None:
        return (
            f"{row.rule} on {shape_name(row.best.shape)} emits {row.tokens:.2f} times exact's tokens per forward at "
            f"{row.speed:.2f} times its speed for {row.best.nats:.2f} nats per token."
        )
    median = result.drafts["regret_median"]
    mistakes = "" if median is None else f"its mistakes cost {median:.1f} nats in the median, and "
    return (
        f"With this drafter leave it exact: {mistakes}no rule below {MAX_NATS:g} nats per token is {MIN_SPEED:g} "
        "times as fast."
    )
