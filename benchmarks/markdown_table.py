"""Print a bench record as the Markdown table of the README, with the source of its numbers.

    python benchmarks/markdown_table.py RECORD.json [BASELINE]

With a baseline the table compares each method with it, as in docs/rules.md. A record of `benchmarks.findings` becomes a
table per temperature, as in docs/findings.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsd_bench.report import head_trees

RATIOS = ("tau", "target_forwards", "answer_tokens", "speed")


def number(value: float | None, digits: int) -> str:
    """Format a number; a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 0) -> str:
    """Format a share in percent; a dash for None."""
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def span(values: dict[str, Any] | None, key: str = "ratio") -> str:
    """Format a ratio with its interval."""
    return "–" if values is None else f"{values[key]:.2f} ({values['low']:.2f}–{values['high']:.2f})"


def score(values: dict[str, Any] | None, digits: int) -> str:
    """Format a mean score with its interval."""
    if values is None:
        return "–"
    mean, low, high = (f"{100 * values[key]:.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} % ({low}–{high})"


def markdown(record: dict[str, Any], name: str) -> str:
    """Return the table of a bench record and a paragraph with its settings, machine and command."""
    methods, settings, environment = record["methods"], record["settings"], record["environment"]
    headers = ["method", "tok/s", *(f"× `{baseline}` (95 %)" for baseline in record["ratios"])]
    headers += ["τ", "τ, mean over categories", "target forwards", "answer tokens", "gate open", "nats spent"]
    headers += ["log-likelihood/token"]
    scored = any(facts.get("score") is not None for facts in methods.values())
    headers += ["task score (95 %)"] if scored else []
    rows = []
    for method, facts in methods.items():
        row = [method, number(facts["tokens_per_second"], 1)]
        for against in record["ratios"].values():
            row.append(span(against[method]["tokens_per_second"], "median") if method in against else "1")
        row += [number(facts["tau"], 2), number(facts["tau_category_mean"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1)]
        row += [percent(facts["gate_open_fraction"]), number(facts["divergence_spent"], 2)]
        row.append(number(facts["log_likelihood_per_token"], 3))
        rows.append(row + [score(facts["intervals"].get("score"), 1)] * scored)
    trees = "".join(f"tree {tree}, " for tree in head_trees(methods))
    answers = next(iter(methods.values()))["answers"]
    return (
        f"{table(headers, rows)}\n\n"
        f"[`{name}`]({name}): {answers} prompts of `{settings['prompts']}`, {settings['max_new_tokens']} new tokens, "
        f"temperature {settings['temperature']:g}, {settings['dtype']}, {trees}batch {settings['batch_size']}, seed "
        f"{settings['seed']}; {environment.get('cpu', environment.get('cpu_model', '?'))}, "
        f"{environment.get('threads')} threads; commit {str(environment.get('commit'))[:10]}.\n\n"
        f"`{environment.get('command')}`"
    )


def beside(record: dict[str, Any], baseline: str) -> str:
    """Return a line per method: speed and tokens per forward as multiples of the baseline's, quality as differences.

    Above temperature 0 a column has the nats spent per answer, because likelihood does not measure loss there.
    """
    methods, ratios, differences = record["methods"], record["ratios"][baseline], record["differences"][baseline]
    headers = ["method", "× tok/s (95 %)", "τ", "× τ", "forwards", "tokens", "log-likelihood", "copied 4-grams"]
    headers.append("repeated 4-grams")
    sampled = record["settings"]["temperature"] > 0
    scored = methods[baseline].get("score") is not None
    headers += ["nats per answer"] * sampled + ["score, points"] * scored
    rows = []
    for method, facts in methods.items():
        if method == baseline:
            speed, points = "1", f"{100 * facts['score']:.1f}" if scored else ""
            likelihood = number(facts["log_likelihood_per_token"], 3)
            copies, repeats = (percent(facts[key], 1) for key in ("copied_4grams", "repeated_4grams"))
        else:
            speed = span(ratios[method]["tokens_per_second"], "median")
            points, likelihood, copies, repeats = qualities(differences[method], score_digits=1)
        row = [method, speed, number(facts["tau"], 2), number(facts["tau"] / methods[baseline]["tau"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1), likelihood, copies, repeats]
        nats = number(float(facts["divergence_spent"]), 1).replace("inf", "∞")
        rows.append(row + [nats] * sampled + [points] * scored)
    return table(headers, rows)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first cell of a row is code, the others are numbers."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    for name, *cells in rows:
        lines.append(" | ".join([f"| `{name}`", *(cell.replace("-", "−") for cell in cells)]) + " |")
    return "\n".join(lines)


def qualities(differences: dict[str, Any], score_digits: int) -> list[str]:
    """Format differences with intervals: score in points, log-likelihood, copied and repeated 4-grams in points."""

    def shown(key: str, digits: int, scale: float = 1.0) -> str:
        if key not in differences:
            return "–"
        mean, low, high = (f"{scale * differences[key][end]:+.{digits}f}" for end in ("mean", "low", "high"))
        return f"{mean} ({low} to {high})"

    copies, repeats = (shown(key, 1, 100) for key in ("copied_4grams", "repeated_4grams"))
    return [shown("score", score_digits, 100), shown("log_likelihood_per_token", 3), copies, repeats]


def sweep(record: dict[str, Any]) -> str:
    """Return a table per temperature with each setting's ratios to exact and its differences from it."""
    headers = ["rule", "× τ", "forwards ×", "length ×", "speed ×", "score, points", "log-likelihood"]
    headers += ["copied 4-grams, points", "repeated 4-grams, points", "nats per answer"]
    parts = []
    for temperature, settings in record["temperatures"].items():
        exact = settings["exact"]
        solved = exact["means"].get("score")
        rows = []
        for name, facts in settings.items():
            if name != "exact":
                row = [name, *(span(facts["ratios"].get(key)) for key in RATIOS)]
                row += [*qualities(facts["differences"], score_digits=0), f"{facts['nats_per_answer']['mean']:.1f}"]
                rows.append(row)
        title = f"Temperature {temperature}, `exact`: {exact['tau']:.2f} tokens per forward"
        title += f", score {score(solved, 0)}." if solved else "."
        parts.append(f"{title}\n\n{table(headers, rows)}\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the record."""
    path, *baseline = sys.argv[1:] if argv is None else argv
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    if "temperatures" in record:
        print(sweep(record))
    else:
        print(beside(record, *baseline) if baseline else markdown(record, path))


if __name__ == "__main__":
    main()
