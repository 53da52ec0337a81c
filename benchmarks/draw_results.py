"""Draws a bench record: accepted length by category, and what fuzzy thresholds buy and cost.

Run: python benchmarks/draw_results.py RECORD.json OUTPUT.png (needs matplotlib)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(record: dict[str, Any], output: Path) -> None:
    methods = {name: facts for name, facts in record["methods"].items() if facts["tau"] and facts["tau"] > 1}
    names = list(methods)
    shades = plt.get_cmap("viridis")([i / max(len(names), 1) for i in range(len(names))])
    colours = dict(zip(names, shades, strict=True))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), dpi=150, width_ratios=[1.7, 1])

    first = methods[names[0]]["categories"]
    categories = sorted(first, key=lambda category: -first[category]["tau"])
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = [methods[name]["categories"][category]["tau"] for category in categories]
        spots = [i + (index - (len(names) - 1) / 2) * width for i in range(len(categories))]
        left.bar(spots, heights, width, label=name, color=colours[name])
    left.set_xticks(range(len(categories)), categories, rotation=35, ha="right")
    left.set_ylabel("accepted length τ (tokens per target forward)")
    left.axhline(1, color="grey", linewidth=0.8)
    left.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 0.98), ncols=len(names))
    left.set_title("by category", pad=24)

    places = {name: (facts["log_likelihood_per_token"], facts["tau_category_mean"]) for name, facts in methods.items()}
    span = max(y for _, y in places.values()) - min(y for _, y in places.values())
    for name, facts in methods.items():
        x, y = places[name]
        right.scatter([x], [y], color=colours[name], s=60, zorder=3)
        note = f"{name}\n{facts['answer_tokens']:.0f} tokens per answer"
        crowded = any(other > x and abs(height - y) < 0.12 * span for other, height in places.values())
        side = {"xytext": (-7, -4), "ha": "right"} if crowded else {"xytext": (7, -4)}
        right.annotate(note, (x, y), textcoords="offset points", fontsize=8, **side)
    right.set_xlabel("target's log-likelihood of the answers (nats per token)")
    right.set_ylabel("τ, mean over categories")
    right.margins(x=0.35, y=0.15)
    right.set_title("what a threshold buys and costs")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    settings = record["settings"]
    figure.suptitle(
        f"{settings['target']}, {next(iter(methods.values()))['answers']} prompts of {settings['prompts']}, "
        f"{settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}, {settings['dtype']}"
    )
    figure.tight_layout()
    figure.savefig(output, facecolor="white")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
