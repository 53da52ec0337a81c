"""Prints a bench record as the Markdown table of the README, with where its numbers come from.

Run: python benchmarks/markdown_table.py RECORD.json [BASELINE]

With a baseline: each method beside it, as docs/rules.md compares rules.
"""

from __future__ import annotations

import json
import sys
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
    headers += ["nats per answer"] if sampled else []
    lines = ["| " + " | ".join(headers) + " |", "|" + "---|" * len(headers)]
    for method, facts in methods.items():
        if method == baseline:
            row = ["1"]
            quality = [f"{facts['log_likelihood_per_token']:.3f}", f"{100 * facts['repeated_4grams']:.1f} %"]
        else:
            speed = ratios[method]["tokens_per_second"]
            row = [f"{speed['median']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})"]
            likelihood, repeats = (differences[method][key] for key in ("log_likelihood_per_token", "repeated_4grams"))
            quality = ["{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**likelihood)]
            quality.append("{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * repeats[k] for k in ("mean", "low", "high"))))
        row += [number(facts["tau"], 2), number(facts["tau"] / methods[baseline]["tau"], 2)]
        row += [number(facts["target_forwards"], 1), number(facts["answer_tokens"], 1)]
        quality += [number(float(facts["divergence_spent"]), 1)] if sampled else []
        lines.append(" | ".join([f"| `{method}`", *row, *(text.replace("-", "−") for text in quality)]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    print(beside(found, sys.argv[2]) if len(sys.argv) > 2 else markdown(found, sys.argv[1]))
