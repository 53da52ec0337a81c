"""The report of a sweep: one HTML file with everything in it, no script, readable in greyscale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fsd_bench.evidence.charts import Point, Series, bars, chart
from fsd_bench.evidence.settings import EXACT
from fsd_bench.evidence.summary import At, Sweep, read_sweep, summarise, tau_by_position
from fsd_bench.intervals import mean_text, ratio_text
from fsd_infer.errors import FsdError
from fsd_infer.files import write_text
from fsd_infer.rules import Source

STYLE = """
:root{color-scheme:light}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1180px;padding:1rem;color:#111}
h1{font-size:1.5rem}
h2{font-size:1.25rem;border-bottom:2px solid #111;margin-top:2.2rem}
h3{font-size:1.05rem}
table{border-collapse:collapse;font-size:12px;white-space:nowrap}
td,th{border-bottom:1px solid #ccc;padding:.25rem .5rem;text-align:right}
td:first-child,th:first-child{text-align:left}
.wide{overflow-x:auto}
.charts{display:flex;flex-wrap:wrap;gap:.6rem;margin-top:1rem}
svg{width:560px;max-width:100%;height:auto;border:1px solid #ddd;background:#fff}
.note{color:#444;font-size:13px}
summary{cursor:pointer}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:.8rem}
.pair div{border:1px solid #ccc;padding:.5rem;white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px}
.e{border-bottom:1px dotted #111}
.g{background:#d6d6d6;border:1px solid #111;font-weight:600}
@media(max-width:760px){.pair{grid-template-columns:1fr}}
"""
ORIGIN = {Source.TARGET: "", Source.EXACT: "e", Source.GATE: "g"}
# (of a summary) what is plotted against speed and forwards: title, axis, where it stands, its key, scale
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


def write_page(sweep: str | Path, page: str | Path) -> None:
    """Write the report of a sweep's file, finished or not.

    Raises:
        FsdError: no sweep, not one prompt that every setting has answered, or a file that cannot be written.
    """
    text = render(read_sweep(sweep))
    try:
        write_text(Path(page), text)
    except OSError as error:
        raise FsdError(f"{page} cannot be written ({error.strerror or error}): give another name.") from error


def render(sweep: Sweep) -> str:
    """The page."""
    parts = [_head(sweep)]
    for at in sweep.at:
        if at.turns:
            parts.append(_temperature(sweep, at))
    if len(parts) == 1:
        raise FsdError("no prompt has been answered under every setting yet: let the sweep go on.")
    title = escape(f"Rules on {sweep.head['settings']['target']}")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><style>{STYLE}</style>'
        f"</head><body>{''.join(parts)}</body></html>\n"
    )


def _head(sweep: Sweep) -> str:
    settings, environment = sweep.head["settings"], sweep.head["environment"]
    facts = (
        f"target {settings['target']}, drafter {settings['drafter'] or 'shipped'}, {settings['dtype']}; at most "
        f"{settings['max_new_tokens']} new tokens; {', '.join(settings['prompts'])}; {environment['cpu']}, "
        f"{environment['threads']} threads; commit {environment['commit']}; {environment['date']}"
    )
    return (
        f"<h1>What rules cost and win</h1><p>{escape(facts)}</p><p><code>{escape(environment['command'])}</code></p>"
        '<p class="note">Every setting answered the same prompts. Intervals are 95 % bootstrap intervals over prompts, '
        "paired with exact decoding. A rule is worth something only where it lies above the random gate at equal "
        "speed.</p>"
    )


def _temperature(sweep: Sweep, at: At) -> str:
    names = sweep.settings
    summaries = summarise(at, names, sweep.head["settings"]["seed"])
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(sweep.head["families"][name], []).append(name)
    prompts = len({turn.group for turn in at.turns})
    charts = [*_trade_offs(families, summaries), *_lines(families, at), *_histograms(families, at)]
    return (
        f"<h2>Temperature {at.temperature:g}: {prompts} prompts</h2>"
        f'<div class="wide">{_table(names, summaries)}</div>'
        f'<div class="charts">{"".join(charts)}</div>{_examples(sweep, at)}'
    )


def _table(names: Sequence[str], summaries: dict[str, dict[str, Any]]) -> str:
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("score %", lambda f: mean_text(f["means"].get("score"), 100)),
        ("less exact's", lambda f: mean_text(f["differences"].get("score"), 100, signed=True)),
        ("speed ×", lambda f: ratio_text(f["ratios"].get("speed"))),
        ("τ", lambda f: "-" if f["tau"] is None else f"{f['tau']:.2f}"),
        ("τ ×", lambda f: ratio_text(f["ratios"].get("tau"))),
        ("forwards ×", lambda f: ratio_text(f["ratios"].get("target_forwards"))),
        ("tokens ×", lambda f: ratio_text(f["ratios"].get("answer_tokens"))),
        ("same end %", lambda f: mean_text(f["same_final_answer"], 100)),
        (
            "log-lik less exact's",
            lambda f: mean_text(f["differences"].get("log_likelihood_per_token"), 1, 3, signed=True),
        ),
        ("copied 4-grams %", lambda f: mean_text(f["means"].get("copied_4grams"), 100)),
        ("coverage %", lambda f: mean_text(f["means"].get("coverage"), 100)),
        ("other language %", lambda f: mean_text(f["means"].get("other_language"), 100)),
        ("repeated 4-grams %", lambda f: mean_text(f["means"].get("repeated_4grams"), 100)),
        ("ended %", lambda f: mean_text(f["means"].get("finished_fraction"), 100)),
        ("nats/answer", lambda f: f"{f['divergence_spent']:.2f}"),
        ("open %", lambda f: f"{100 * f['gate_open_fraction']:.0f}"),
    ]
    rows = [[name, *(cell(summaries[name]) for _, cell in columns)] for name in names]
    head = "".join(f"<th>{escape(title)}</th>" for title in ("setting", *(title for title, _ in columns)))
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    """An interval stands below its mean."""
    return escape(text).replace(" [", "<br><small>[").replace("]", "]</small>")


def _trade_offs(families: dict[str, list[str]], summaries: dict[str, dict[str, Any]]) -> list[str]:
    charts = []
    for title, y_label, place, key, scale in QUALITIES:
        for speed, x_label, ratio in SPEEDS:
            series = []
            for style, (family, names) in enumerate(families.items()):
                points = []
                for name in names:
                    y = summaries[name][place] if key is None else summaries[name][place].get(key)
                    x = summaries[name]["ratios"].get(ratio)
                    if y is not None and x is not None:
                        points.append(_point(_parameter(name, names), x, y, scale))
                if points:
                    series.append(Series(_family(family, names), points, style))
            if any(len(one.points) for one in series[1:]):
                charts.append(chart(f"{title} and {speed}", x_label, y_label, series))
    return charts


def _point(label: str, x: dict[str, Any], y: dict[str, Any], scale: float) -> Point:
    return Point(x["ratio"], scale * y["mean"], label, (x["low"], x["high"]), (scale * y["low"], scale * y["high"]))


def _parameter(name: str, names: Sequence[str]) -> str:
    """What sets a setting apart from its family's others."""
    if len(names) == 1:
        return ""
    parts = [one.partition("@")[0].split(":") for one in names]
    own = name.partition("@")[0].split(":")
    return ":".join(part for place, part in enumerate(own) if len({other[place] for other in parts}) > 1)


def _family(family: str, names: Sequence[str]) -> str:
    """A family's name without its lists of parameters."""
    rule, at, tree = family.partition("@")
    return ":".join(part for part in rule.split(":") if "/" not in part) + at + tree


def _shown(families: dict[str, list[str]]) -> list[tuple[str, int]]:
    """(setting, style): of each family the middle one, so that charts of whole answers stay readable."""
    return [(names[len(names) // 2], style) for style, names in enumerate(families.values())]


def _lines(families: dict[str, list[str]], at: At) -> list[str]:
    series, x_ticks = [], {}
    for name, style in _shown(families):
        points = []
        for start, end, tau, _ in tau_by_position(at.lines[name]):
            x = math.log2((start + end) / 2)
            x_ticks[x] = f"{start}–{end - 1}"
            points.append(Point(x, tau))
        if points:
            series.append(Series(name, points, style))
    if not series:
        return []
    labels = ("Accepted length by position in the answer", "position of the round's first token", "tokens per forward")
    return [chart(*labels, series, list(x_ticks.items()))]


def _histograms(families: dict[str, list[str]], at: At) -> list[str]:
    spent = {name: [turn.runs[name].answers[0].divergence_spent for turn in at.turns] for name, _ in _shown(families)}
    most = max((value for values in spent.values() for value in values if math.isfinite(value)), default=0.0)
    if not most:
        return []
    edges, rows = np.linspace(0, most, 13), []
    for name, style in _shown(families):
        counts = np.histogram(np.clip(spent[name], 0, most), edges)[0]  # infinite ones are in the last bin
        rows.append((name, list(counts / len(spent[name])), style))
    return [bars("Nats spent per answer", "nats", "share of answers", list(edges), rows)]


def _examples(sweep: Sweep, at: At) -> str:
    parts = []
    prompts = sweep.head["prompts"]
    for place, exact in enumerate(at.lines[EXACT]):
        if "pieces" not in exact or exact["repeat"]:
            continue
        prompt = prompts[exact["prompt"]]
        text = prompt["text"] if len(prompt["text"]) <= 600 else prompt["text"][:600] + " …"
        pairs = []
        for name in sweep.settings[1:]:
            other = at.lines[name][place]
            pairs.append(
                f'<h3>{escape(name)}</h3><div class="pair">{_answer(exact, EXACT)}{_answer(other, name)}</div>'
            )
        reference = f'<p class="note">reference: {escape(prompt["reference"][:300])}</p>' if prompt["reference"] else ""
        parts.append(
            f"<details><summary>{escape(prompt['where'])}: {escape(text[:90])}</summary><p>{escape(text)}</p>"
            f"{reference}{''.join(pairs)}</details>"
        )
    if not parts:
        return ""
    legend = (
        '<p class="note">Tokens by origin: the target\'s own draw, '
        '<span class="e">a draft that the exact rule accepts</span>, '
        '<span class="g">a token that only another law let through</span>.</p>'
    )
    return f"<h3>Answers beside exact's</h3>{legend}{''.join(parts)}"


def _answer(line: dict[str, Any], name: str) -> str:
    """Tokens marked by origin; neighbours of one origin share a mark."""
    runs: list[tuple[str, str]] = []
    for piece, source in zip(line["pieces"], line["sources"]):
        kind = ORIGIN[Source(int(source))]
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + piece)
        else:
            runs.append((kind, piece))
    text = "".join(f'<span class="{kind}">{escape(piece)}</span>' if kind else escape(piece) for kind, piece in runs)
    score = "" if line["score"] is None else f", score {line['score']:.2g}"
    facts = f"{name}: {len(line['tokens'])} tokens, {line['target_forwards']} forwards{score}"
    return f"<div><strong>{escape(facts)}</strong>\n{text}</div>"
