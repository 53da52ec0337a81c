"""Write the report of a sweep: one self-contained HTML file without scripts, readable in greyscale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template

from fsd_bench.base import MeasuredAnswer
from fsd_bench.intervals import mean_text, ratio_text
from fsd_bench.sweep.charts import Point, Series, bars, chart
from fsd_bench.sweep.runner import Sweep, TemperatureRuns, read_sweep
from fsd_bench.sweep.summary import summarise, tau_by_position
from fsd_core.errors import FsdError
from fsd_core.files import write_text
from fsd_core.tables import number, percent
from fsd_infer.rules import TokenOrigin

ORIGIN = {TokenOrigin.TARGET: "", TokenOrigin.EXACT: "e", TokenOrigin.GATE: "g"}
# of a summary, plotted over speed and forwards: title, axis, part and key in the summary, scale
QUALITIES = (
    ("Score", "score less exact's, points", "differences", "score", 100.0),
    ("Same final answer", "prompts with exact's final answer, %", "same_final_answer", None, 100.0),
    ("Log-likelihood", "nats per token, less exact's", "differences", "log_likelihood_per_token", 1.0),
    ("Copies", "4-grams of the prompt less exact's, points", "differences", "copied_4grams", 100.0),
    ("Repetition", "repeated 4-grams less exact's, points", "differences", "repeated_4grams", 100.0),
)
SPEEDS = (
    ("speed", "new tokens per second / exact's", "speed"),
    ("target forwards", "target forwards per answer / exact's", "target_forwards"),
)


def _mean(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda facts: mean_text(facts["means"].get(key), 100.0, 1)


def _less(key: str, digits: int = 1, scale: float = 100.0) -> Callable[[dict[str, Any]], str]:
    return lambda facts: mean_text(facts["differences"].get(key), scale, digits, signed=True)


def _times(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda facts: ratio_text(facts["ratios"].get(key))


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "score %": _mean("score"),
    "less exact's": _less("score"),
    "speed ×": _times("speed"),
    "τ": lambda facts: number(facts["tau"]),
    "τ ×": _times("tau"),
    "forwards ×": _times("target_forwards"),
    "tokens ×": _times("answer_tokens"),
    "same end %": lambda facts: mean_text(facts["same_final_answer"], 100),
    "log-lik less exact's": _less("log_likelihood_per_token", 3, 1.0),
    "copied 4-grams %": _mean("copied_4grams"),
    "coverage %": _mean("coverage"),
    "other language %": _mean("other_language"),
    "repeated 4-grams %": _mean("repeated_4grams"),
    "ended %": _mean("finished_fraction"),
    "nats/answer": lambda facts: number(facts["divergence_spent"]),
    "open %": lambda facts: percent(facts["gate_open_fraction"], 0),
}


def write_page(sweep: str | Path, page: str | Path) -> None:
    """Write the report of a sweep's file, finished or not.

    Raises:
        FsdError: no sweep, or no prompt that every setting has answered.
    """
    write_text(Path(page), render(read_sweep(sweep)))


def render(sweep: Sweep) -> str:
    """Return the page. Raises FsdError if no prompt has been answered under every setting."""
    seed = sweep.head["settings"]["seed"]
    parts = []
    for runs in sweep.at:
        if not runs.comparisons:
            continue
        facts = summarise(runs.comparisons, sweep.settings, seed)
        families: dict[str, list[str]] = {}
        for name in sweep.settings:
            families.setdefault(sweep.head["families"][name], []).append(name)
        parts.append({
            "temperature": runs.temperature,
            "prompts": len({index for comparison in runs.comparisons for index in comparison.prompts}),
            "rows": [[name, *(cell(facts[name]) for cell in COLUMNS.values())] for name in sweep.settings],
            "charts": [*_trade_offs(families, facts), *_lines(families, runs), *_histograms(families, runs)],
            "examples": _examples(sweep, runs),
        })  # fmt: skip
    if not parts:
        raise FsdError("no prompt has been answered under every setting yet: continue the sweep.")
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"), autoescape=True)
    return template.render(head=sweep.head, titles=["setting", *COLUMNS], parts=parts, marked=_marked)


def _trade_offs(families: dict[str, list[str]], summaries: dict[str, dict[str, Any]]) -> list[str]:
    charts = []
    for title, y_label, quantity, key, scale in QUALITIES:
        for speed, x_label, ratio in SPEEDS:
            series = []
            for style, (family, names) in enumerate(families.items()):
                points = []
                for name in names:
                    y = summaries[name][quantity] if key is None else summaries[name][quantity].get(key)
                    x = summaries[name]["ratios"].get(ratio)
                    if y is not None and x is not None:
                        points.append(_point(_parameter(name, names), x, y, scale))
                if points:
                    series.append(Series(_family(family), points, style))
            if any(len(line.points) for line in series[1:]):
                charts.append(chart(f"{title} and {speed}", x_label, y_label, series))
    return charts


def _point(label: str, x: dict[str, Any], y: dict[str, Any], scale: float) -> Point:
    return Point(x["ratio"], scale * y["mean"], label, (x["low"], x["high"]), (scale * y["low"], scale * y["high"]))


def _parameter(name: str, names: Sequence[str]) -> str:
    """Return the parameters in which a setting differs from the others of its family."""
    if len(names) == 1:
        return ""
    parts = [setting.partition("@")[0].split(":") for setting in names]
    own = name.partition("@")[0].split(":")
    return ":".join(part for index, part in enumerate(own) if len({other[index] for other in parts}) > 1)


def _family(family: str) -> str:
    """Return a family's name without its lists of parameters."""
    rule, sign, tree = family.partition("@")
    return ":".join(part for part in rule.split(":") if "/" not in part) + sign + tree


def _shown(families: dict[str, list[str]]) -> list[tuple[str, int]]:
    """Return (setting, style) of each family's middle setting, which keeps charts of whole answers readable."""
    return [(names[len(names) // 2], style) for style, names in enumerate(families.values())]


def _lines(families: dict[str, list[str]], runs: TemperatureRuns) -> list[str]:
    series, x_ticks = [], {}
    for name, style in _shown(families):
        points = []
        rounds = [answer.trace.rounds for answer in runs.answers(name) if answer.trace is not None]
        for start, end, tau, _ in tau_by_position(rounds):
            x = math.log2((start + end) / 2)
            x_ticks[x] = f"{start}–{end - 1}"
            points.append(Point(x, tau))
        if points:
            series.append(Series(name, points, style))
    if not series:
        return []
    labels = ("Accepted length by position in the answer", "position of the round's first token", "tokens per forward")
    return [chart(*labels, series, list(x_ticks.items()))]


def _histograms(families: dict[str, list[str]], runs: TemperatureRuns) -> list[str]:
    spent = {name: [answer.divergence_spent for answer in runs.answers(name)] for name, _ in _shown(families)}
    most = max((value for values in spent.values() for value in values if math.isfinite(value)), default=0.0)
    if not most:
        return []
    edges, rows = np.linspace(0, most, 13), []
    for name, style in _shown(families):
        counts = np.histogram(np.clip(spent[name], 0, most), edges)[0]  # the last bin has infinite ones
        rows.append((name, list(counts / len(spent[name])), style))
    return [bars("Nats spent per answer", "nats", "share of answers", list(edges), rows)]


def _examples(
    sweep: Sweep, runs: TemperatureRuns
) -> list[tuple[dict[str, Any], MeasuredAnswer, list[tuple[str, MeasuredAnswer]]]]:
    """Return (prompt, exact's answer, the others by setting) of the prompts that are shown."""
    examples = []
    for comparison in runs.comparisons:
        for index, answers in zip(comparison.prompts, zip(*(comparison.runs[name].answers for name in sweep.settings))):
            exact, *others = zip(sweep.settings, answers)
            if comparison.repeat == 0 and exact[1].trace is not None and exact[1].trace.pieces is not None:
                examples.append((sweep.head["prompts"][index], exact[1], others))
    return examples


def _marked(answer: MeasuredAnswer) -> Iterator[tuple[str, str]]:
    """Yield (mark, text) of an answer's tokens. Neighbours of one origin share a mark."""
    assert answer.trace is not None
    marks = [ORIGIN[TokenOrigin(int(source))] for source in answer.trace.sources]
    for mark, pieces in groupby(zip(marks, answer.trace.pieces or ()), itemgetter(0)):
        yield mark, "".join(piece for _, piece in pieces)
