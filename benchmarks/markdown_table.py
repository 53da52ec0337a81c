"""Prints a bench record as the Markdown table of the README, with where its numbers come from.

Run: python benchmarks/markdown_table.py RECORD.json [BASELINE]

With a baseline: each method beside it, as docs/rules.md compares rules. A record of `benchmarks.findings`: a table per
temperature, as in docs/findings.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsd_bench.report import head_trees


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def markdown(record: dict[str, Any], name: str) -> str:
    methods, settings, environment = record["methods"], record["settings"], record["environment"]
    baselines = list(record["ratios"])
    headers = ["method", "tok/s", *(f"× `{b}` (95 %)" for b in baselines), "τ", "τ, mean over categories"]
    headers += ["target forwards", "answer tokens", "gate open", "nats spent", "log-likelihood/token"]
    scored = any(facts.get("score") is not None for facts in methods.values())
    headers += ["task score (95 %)"] if scored else []
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    for method, facts in methods.items():
        row = [f"`{method}`", number(facts["tokens_per_second"], 1)]
        for baseline in baselines:
            compared = record["ratios"][baseline].get(method)
            ratio = None if compared is None else compared["tokens_per_second"]
            row.append("1" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})")
        row += [number(facts["tau"], 2), number(facts["tau_category_mean"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1)]
        share = facts["gate_open_fraction"]
        row += ["–" if share is None else f"{100 * share:.0f} %", number(facts["divergence_spent"], 2)]
        row += [number(facts["log_likelihood_per_token"], 3)]
        if scored:
            compared = facts["intervals"].get("score")
            percent = {} if compared is None else {key: 100 * compared[key] for key in ("mean", "low", "high")}
            row.append("{mean:.1f} % ({low:.1f}–{high:.1f})".format(**percent) if percent else "–")
        lines.append("| " + " | ".join(row) + " |")
    trees = "".join(f"tree {tree}, " for tree in head_trees(methods))
    answers = next(iter(methods.values()))["answers"]
    lines += [
        "",
        f"[`{name}`]({name}): {answers} prompts of `{settings['prompts']}`, {settings['max_new_tokens']} new tokens, "
        f"temperature {settings['temperature']:g}, {settings['dtype']}, {trees}batch {settings['batch_size']}, seed "
        f"{settings['seed']}; {environment.get('cpu', environment.get('cpu_model', '?'))}, "
        f"{environment.get('threads')} threads; commit {str(environment.get('commit'))[:10]}.",
        "",
        f"`{environment.get('command')}`",
    ]
    return "\n".join(lines)


def beside(record: dict[str, Any], baseline: str) -> str:
    """A line per method: speed and tokens per forward as multiples of the baseline's, quality as differences.

    Above temperature 0 with the nats spent per answer, since likelihood is no measure of loss there.
    """
    methods, ratios, differences = record["methods"], record["ratios"][baseline], record["differences"][baseline]
    headers = [
        "method",
        "× tok/s (95 %)",
        "τ",
        "× τ",
        "forwards",
        "tokens",
        "log-likelihood",
        "copied 4-grams",
        "repeated 4-grams",
    ]
    sampled = record["settings"]["temperature"] > 0
    scored = methods[baseline].get("score") is not None
    headers += ["nats per answer"] * sampled + ["score, points"] * scored
    rows = []
    for method, facts in methods.items():
        if method == baseline:
            speed = "1"
            shares = [
                facts[key] for key in ("copied_4grams", "repeated_4grams")
            ]  # None where no answer has four tokens
            score = f"{100 * facts['score']:.1f}" if scored else ""
            likelihood = number(facts["log_likelihood_per_token"], 3)
            copies, repeats = ("–" if share is None else f"{100 * share:.1f} %" for share in shares)
        else:
            speedup = ratios[method]["tokens_per_second"]
            speed = f"{speedup['median']:.2f} ({speedup['low']:.2f}–{speedup['high']:.2f})"
            score, likelihood, copies, repeats = qualities(differences[method], score_digits=1)
        row = [method, speed, number(facts["tau"], 2), number(facts["tau"] / methods[baseline]["tau"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1), likelihood, copies, repeats]
        nats = number(float(facts["divergence_spent"]), 1).replace("inf", "∞")
        rows.append(row + [nats] * sampled + [score] * scored)
    return table(headers, rows)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: each row's first cell is code, the others are numbers."""
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    for name, *cells in rows:
        lines.append(" | ".join([f"| `{name}`", *(cell.replace("-", "−") for cell in cells)]) + " |")
    return "\n".join(lines)


def qualities(differences: dict[str, Any], score_digits: int) -> list[str]:
    """Differences, with their intervals, of score in points, log-likelihood, copied and repeated 4-grams in points."""

    def shown(key: str, digits: int, scale: float = 1.0) -> str:
        if key not in differences:
            return "–"
        mean, low, high = (f"{scale * differences[key][end]:+.{digits}f}" for end in ("mean", "low", "high"))
        return f"{mean} ({low} to {high})"

    copies, repeats = (shown(key, 1, 100) for key in ("copied_4grams", "repeated_4grams"))
    return [shown("score", score_digits, 100), shown("log_likelihood_per_token", 3), copies, repeats]


def sweep(record: dict[str, Any]) -> str:
    """A table per temperature: each setting's ratios to exact and its differences from it."""
    headers = ["rule", "× τ", "forwards ×", "length ×", "speed ×", "score, points", "log-likelihood"]
    headers += ["copied 4-grams, points", "repeated 4-grams, points", "nats per answer"]
    parts = []
    for temperature, settings in record["temperatures"].items():
        exact = settings["exact"]
        score = {end: 100 * share for end, share in exact["means"].get("score", {}).items()}
        solved = ", score {mean:.0f} % ({low:.0f}–{high:.0f})".format(**score) if score else ""
        rows = []
        for name, facts in settings.items():
            if name != "exact":
                ratios = [facts["ratios"][key] for key in ("tau", "target_forwards", "answer_tokens", "speed")]
                row = [name, *("{ratio:.2f} ({low:.2f}–{high:.2f})".format(**ratio) for ratio in ratios)]
                row += [*qualities(facts["differences"], score_digits=0), f"{facts['nats_per_answer']['mean']:.1f}"]
                rows.append(row)
        title = f"Temperature {temperature}, `exact`: {exact['tau']:.2f} tokens per forward{solved}."
        parts.append(f"{title}\n\n{table(headers, rows)}\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of the record named."""
    path, *baseline = sys.argv[1:] if argv is None else argv
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    if "temperatures" in record:
        print(sweep(record))
    else:
        print(beside(record, *baseline) if baseline else markdown(record, path))


if __name__ == "__main__":
    main()
