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

from fsd_infer.cli.report import head_trees


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
            found = record["ratios"][baseline].get(method)
            ratio = None if found is None else found["tokens_per_second"]
            row.append("1" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})")
        row += [number(facts["tau"], 2), number(facts["tau_category_mean"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1)]
        share = facts["gate_open_fraction"]
        row += ["–" if share is None else f"{100 * share:.0f} %", number(facts["divergence_spent"], 2)]
        row += [number(facts["log_likelihood_per_token"], 3)]
        if scored:
            found = facts["intervals"].get("score")
            percent = {} if found is None else {key: 100 * found[key] for key in ("mean", "low", "high")}
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
    headers = ["method", "× tok/s (95 %)", "τ", "× τ", "forwards", "tokens", "log-likelihood", "repeated 4-grams"]
    sampled = record["settings"]["temperature"] > 0
    scored = methods[baseline].get("score") is not None
    headers += ["nats per answer"] * sampled + ["score, points"] * scored
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    for method, facts in methods.items():
        if method == baseline:
            row = ["1"]
            repeated = facts["repeated_4grams"]  # None where no answer has four tokens
            quality = [
                number(facts["log_likelihood_per_token"], 3),
                "–" if repeated is None else f"{100 * repeated:.1f} %",
            ]
            score = [f"{100 * facts['score']:.1f}"] if scored else []
        else:
            speed = ratios[method]["tokens_per_second"]
            row = [f"{speed['median']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})"]
            quality = [difference(differences[method].get("log_likelihood_per_token"), 3)]
            quality.append(difference(differences[method].get("repeated_4grams"), 1, 100))
            score = [difference(differences[method].get("score"), 1, 100)] * scored
        row += [number(facts["tau"], 2), number(facts["tau"] / methods[baseline]["tau"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1)]
        quality += [number(float(facts["divergence_spent"]), 1).replace("inf", "∞")] * sampled + score
        lines.append(" | ".join([f"| `{method}`", *row, *(text.replace("-", "−") for text in quality)]) + " |")
    return "\n".join(lines)


def difference(found: dict[str, Any] | None, digits: int, scale: float = 1.0) -> str:
    """A difference times ``scale`` with its interval."""
    if found is None:
        return "–"
    mean, low, high = (f"{scale * found[key]:+.{digits}f}" for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def sweep(record: dict[str, Any]) -> str:
    """A table per temperature: each setting's ratios to exact and its differences from it."""
    parts = []
    for temperature, settings in record["temperatures"].items():
        exact = settings["exact"]
        score = exact["means"].get("score")
        solved = "" if score is None else ", score {:.0f} % ({:.0f}–{:.0f})".format(
            *(100 * score[key] for key in ("mean", "low", "high"))
        )  # fmt: skip
        parts.append(f"Temperature {temperature}, `exact`: {exact['tau']:.2f} tokens per forward{solved}.\n")
        headers = ["rule", "× τ", "forwards ×", "length ×", "speed ×", "score, points", "log-likelihood"]
        headers += ["repeated 4-grams, points", "nats per answer"]
        lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
        for name, facts in settings.items():
            if name == "exact":
                continue
            ratios = [facts["ratios"][key] for key in ("tau", "target_forwards", "answer_tokens", "speed")]
            row = ["{ratio:.2f} ({low:.2f}–{high:.2f})".format(**ratio) for ratio in ratios]
            differences = facts["differences"]
            row.append(difference(differences.get("score"), 0, 100))
            row.append(difference(differences.get("log_likelihood_per_token"), 3))
            row.append(difference(differences.get("repeated_4grams"), 1, 100))
            row.append(f"{facts['nats_per_answer']['mean']:.1f}")
            lines.append(" | ".join([f"| `{name}`", *(text.replace("-", "−") for text in row)]) + " |")
        parts.append("\n".join(lines) + "\n")
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
