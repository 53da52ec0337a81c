"""Draws where the time of a bench record goes: milliseconds per round, by phase, for each method that reports them.

Beside it, if the record has a profile: what a forward over more nodes costs.

Run: python benchmarks/draw_phases.py RECORD.json OUTPUT.png (needs matplotlib)
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
    methods = {name: facts for name, facts in record["methods"].items() if facts.get("milliseconds_per_round")}
    if not methods:
        sys.exit("no method of this record reports its phases")
    curve = (record.get("profile") or {}).get("forward_seconds")
    size = (12 if curve else 9, 1.2 + 0.5 * max(len(methods), 4))
    figure, axes = plt.subplots(
        1, 2 if curve else 1, figsize=size, dpi=150, squeeze=False, width_ratios=[3, 1] if curve else [1]
    )
    draw_rounds(axes[0, 0], methods)
    if curve:
        draw_curve(axes[0, 1], {int(nodes): seconds for nodes, seconds in curve.items()})
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(output, facecolor="white")


def draw_rounds(ax: Any, methods: dict[str, Any]) -> None:
    """A bar per method."""
    phases = list(dict.fromkeys(phase for facts in methods.values() for phase in facts["milliseconds_per_round"]))
    colours = dict(zip(phases, plt.get_cmap("viridis")([i / max(len(phases) - 1, 1) for i in range(len(phases))])))
    names = list(methods)[::-1]
    left = [0.0] * len(names)
    for phase in phases:
        widths = [methods[name]["milliseconds_per_round"].get(phase, 0.0) for name in names]
        ax.barh(names, widths, left=left, label=phase, color=colours[phase], height=0.65)
        left = [start + width for start, width in zip(left, widths)]
    for place, name in enumerate(names):
        facts = methods[name]
        note = f"  τ {facts['tau']:.2f}, {left[place] / facts['tau']:.1f} ms per token, "
        note += f"{100 * facts['round_overhead_fraction']:.1f} % overhead"
        ax.text(left[place], place, note, va="center", fontsize=8)
    ax.set_xlim(0, 1.5 * max(left))
    ax.set_xlabel("milliseconds per round (one verifying forward of the target), prefill left out")
    ax.legend(frameon=False, ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_curve(ax: Any, seconds: dict[int, float]) -> None:
    """Cost of one target forward."""
    nodes = sorted(seconds)
    ax.plot(nodes, [1000 * seconds[n] for n in nodes], marker="o", markersize=4, color="#3b528b")
    if {1, 16} <= set(nodes):
        ax.annotate(
            f"16 nodes: {seconds[16] / seconds[1]:.2f} ×", (16, 1000 * seconds[16]), xytext=(0, -16),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
    ax.set_ylim(0, None)
    ax.set_xlabel("nodes of one target forward")
    ax.set_ylabel("milliseconds")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
