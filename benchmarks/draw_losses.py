"""Draws a record of `benchmarks.compare_losses`: accepted length against divergence spent per token, a line per arm.

Run: python benchmarks/draw_losses.py RECORD.json OUTPUT.png (needs matplotlib)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#efb118", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5", "#ff8ab7", "#555555")


def draw(summary: Mapping[str, Any], title: str, output: Path) -> None:
    """Two panels: the curves with all seeds, and for the first baseline the ratios where both spend the same."""
    tables = summary["equal_divergence"]
    figure = Figure(figsize=(13 if tables else 7.5, 5), dpi=150)
    panels = figure.subplots(1, 2 if tables else 1, squeeze=False)[0]
    colours = {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(summary["arms"])}
    _curves(panels[0], summary, colours)
    if tables:
        _ratios(panels[1], tables[0], colours)
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xlabel("divergence spent (nats per token)")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(output, facecolor="white")


def _curves(ax: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    for arm, rules in summary["arms"].items():
        x = [facts["spent_per_token"]["mean"] for facts in rules.values()]
        y = [facts["tau"]["mean"] for facts in rules.values()]
        ax.plot(x, y, color=colours[arm], linewidth=1.8, marker="o", markersize=4, label=arm, zorder=3)
        low = [min(facts["tau"]["seeds"]) for facts in rules.values()]
        high = [max(facts["tau"]["seeds"]) for facts in rules.values()]
        ax.fill_between(x, low, high, color=colours[arm], alpha=0.15, linewidth=0)
        for facts in rules.values():
            seeds = facts["spent_per_token"]["seeds"], facts["tau"]["seeds"]
            ax.scatter(*seeds, color=colours[arm], s=7, alpha=0.5, zorder=2)
    ax.set_ylabel("accepted length τ (tokens per target forward)")
    ax.set_title("leftmost: exact; then by threshold (band and dots: seeds)", fontsize=9)
    ax.legend(frameon=False)


def _ratios(ax: Any, table: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    base = table["baseline"]
    ax.axhline(1, color=colours[base], linewidth=1.8, label=base)
    others = [arm for arm in table["arms"] if arm != base]
    span = max((place["spent"] for place in table["at"]), default=0.0)
    for number, arm in enumerate(others):
        shift = (number - (len(others) - 1) / 2) * 0.006 * span  # so that intervals do not hide each other
        cells = [
            (place["spent"] + shift, cell)
            for place, cell in zip(table["at"], table["arms"][arm]["at"], strict=True)
            if cell["ratio"] is not None
        ]
        x, y = [place for place, _ in cells], [cell["ratio"] for _, cell in cells]
        ax.plot(x, y, color=colours[arm], linewidth=1.2, marker="o", markersize=4, label=arm)
        known = [(place, cell) for place, cell in cells if cell["low"] is not None]
        ax.vlines(
            [place for place, _ in known],
            [cell["low"] for _, cell in known],
            [cell["high"] for _, cell in known],
            color=colours[arm],
            linewidth=1,
        )
    ax.set_ylabel(f"τ divided by that of {base}")
    ax.set_title("where both spend the same (bars: 95 % intervals)", fontsize=9)
    ax.legend(frameon=False)


def title_of(record: Mapping[str, Any]) -> str:
    """One line on what was compared."""
    evaluation, summary = record["settings"]["evaluation"], record["summary"]
    steps = sorted({arm["steps"] for arm in record["settings"]["arms"]})
    return (
        f"{Path(record['settings']['model']['target']).name}: {' or '.join(map(str, steps))} steps, "
        f"{len(summary['seeds'])} seed{'s' if len(summary['seeds']) > 1 else ''}, "
        f"{summary['prompts']} held-out prompts, {evaluation['max_new_tokens']} new tokens, "
        f"temperature {evaluation['temperature']:g}"
    )


if __name__ == "__main__":
    made = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    draw(made["summary"], title_of(made), Path(sys.argv[2]))
