"""Draws the nodes of every round of ``--tree auto`` from a record of ``benchmarks.trees``.

Example: python -m benchmarks.draw_trees benchmarks/results/trees-smollm2-135m-maths.json docs/figures/trees.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLOURS = {"chat": "tab:blue", "sums": "tab:orange", "summaries": "tab:green"}


def draw(record: dict[str, Any], path: Path) -> None:
    """A panel per rule: rounds from left to right, coloured by the kind of the prompt."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rules = record["rules"]
    figure, panels = plt.subplots(len(rules), 1, figsize=(10, 2.6 * len(rules)), sharey=True, squeeze=False)
    for panel, (rule, found) in zip(panels[:, 0], rules.items()):
        start, named = 0, set()
        for kind, nodes in zip(record["kinds"], found["trees"]["by_prompt"]):
            label = None if kind in named else kind
            named.add(kind)
            panel.bar(range(start, start + len(nodes)), nodes, width=1.0, color=COLOURS[kind], label=label)
            start += len(nodes)
        panel.set_title(rule)
        panel.set_ylabel("nodes")
        panel.set_xlim(0, start)
    panels[0, 0].legend(loc="upper right", ncols=3)
    panels[-1, 0].set_xlabel("round")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draw_trees", description=__doc__.split("\n\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.record.read_text("utf-8")), args.figure)


if __name__ == "__main__":
    main()
