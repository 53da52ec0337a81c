"""Draws where the time of a bench record goes: milliseconds per round, by phase, for each method that tells.

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
        sys.exit("no method of this record tells where its time goes")
    phases = list(dict.fromkeys(phase for facts in methods.values() for phase in facts["milliseconds_per_round"]))
    colours = dict(zip(phases, plt.get_cmap("viridis")([i / max(len(phases) - 1, 1) for i in range(len(phases))])))
    figure, ax = plt.subplots(figsize=(9, 1.2 + 0.5 * len(methods)), dpi=150)
    names = list(methods)[::-1]
    left = [0.0] * len(names)
    for phase in phases:
        widths = [methods[name]["milliseconds_per_round"].get(phase, 0.0) for name in names]
        ax.barh(names, widths, left=left, label=phase, color=colours[phase], height=0.65)
        left = [start + width for start, width in zip(left, widths)]
    for place, name in enumerate(names):
        facts = methods[name]
        note = f"  τ {facts['tau']:.2f}, {100 * facts['round_overhead_fraction']:.1f} % overhead"
        ax.text(left[place], place, note, va="center", fontsize=8)
    ax.set_xlim(0, 1.35 * max(left))
    ax.set_xlabel("milliseconds per round (one verifying forward of the target), prefill left out")
    ax.legend(frameon=False, ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(output, facecolor="white")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
