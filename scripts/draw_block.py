"""Agreement by position against training time: a head that drafts blocks, and EAGLE's.

Run: python scripts/draw_block.py BLOCK.csv EAGLE.csv EAGLE_MINUTES OUT.png
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def read(path: Path) -> list[dict[str, str]]:
    """The validation rows of a training log, with ``minutes`` where the log has them."""
    return [row for row in csv.DictReader(path.open()) if row.get("val_tau")]


def main() -> None:
    """Draw it."""
    block, eagle = (read(Path(name)) for name in sys.argv[1:3])
    last = float(eagle[-1]["step"])
    for row in eagle:
        row["minutes"] = str(float(row["step"]) / last * float(sys.argv[3]))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, rows, title in zip(axes, (block, eagle), ("block of seven, from the shipped head", "EAGLE, sixth run")):
        minutes = [float(row["minutes"]) for row in rows]
        for position in range(7):
            name = f"val_agreement_{position}"
            if rows[0].get(name):
                axis.plot(minutes, [float(row[name]) for row in rows], marker=".", label=f"{position + 1}")
        axis.set(title=title, xlabel="minutes of training, two cores", ylim=(0, 0.8))
        axis.grid(alpha=0.3)
        axis.legend(title="position", ncols=2, fontsize=8)
    axes[0].set_ylabel("greedy agreement with the target")
    figure.savefig(sys.argv[4], dpi=110)


if __name__ == "__main__":
    main()
