"""Draws docs/figures/round.png: one round of decoding. Run: python scripts/draw_round.py (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, GREY = "#1f2933", "#9aa5b1"
TARGET, EXACT, GATE, REJECT = "#cfe3fa", "#c8ecd0", "#fde3b3", "#f1f3f5"


def box(ax, x, y, text, colour="white", width=0.92, height=0.5, size=10, edge=INK, style="-", weight="normal"):
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.02,rounding_size=0.08",
            facecolor=colour, edgecolor=edge, linewidth=1.2, linestyle=style,
        )
    )  # fmt: skip
    ax.text(x, y, text, ha="center", va="center", fontsize=size, color=INK, weight=weight)


def arrow(ax, start, end, colour=INK, width=1.2, style="-|>"):
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=11, color=colour, linewidth=width))


def label(ax, x, y, text, size=9, colour=INK, ha="left", weight="normal"):
    ax.text(x, y, text, fontsize=size, color=colour, ha=ha, va="center", weight=weight)


def main() -> None:
    figure, ax = plt.subplots(figsize=(13, 7.6), dpi=150)
    ax.set_xlim(0, 15.2)
    ax.set_ylim(-0.2, 8.7)
    ax.axis("off")

    # 1. the text and the drafter
    label(ax, 0.2, 8.35, "1  draft", 12, weight="bold")
    label(
        ax,
        1.5,
        8.35,
        "the head reads (embedding of token i+1, target's feature i) and drafts a tree under the last token",
    )
    for i, word in enumerate(["The", "sun", "is"]):
        box(ax, 0.7 + i, 6.9, word, TARGET)
    label(ax, 0.2, 7.45, "text, read by the target", 9, GREY)
    nodes = {
        "root": (4.1, 6.0, "a", None),
        "a1": (6.0, 7.2, "big", "root"),
        "a2": (6.0, 6.0, "star", "root"),
        "a3": (6.0, 4.8, "very", "root"),
        "b1": (7.9, 6.6, "that", "a2"),
        "b2": (7.9, 5.7, "in", "a2"),
        "c1": (9.8, 7.0, "shines", "b1"),
        "c2": (9.8, 6.2, "is", "b1"),
        "c3": (9.8, 5.4, "our", "b2"),
    }
    accepted = {"root": TARGET, "a2": EXACT, "b2": GATE, "c3": EXACT}
    for name, (x, y, _, parent) in nodes.items():
        if parent:
            px, py = nodes[parent][:2]
            strong = name in accepted
            arrow(ax, (px + 0.48, py), (x - 0.48, y), INK if strong else GREY, 2.0 if strong else 1.0)
    for name, (x, y, word, _) in nodes.items():
        box(ax, x, y, word, accepted.get(name, REJECT), edge=INK if name in accepted else GREY)
    arrow(ax, (3.2, 6.85), (3.6, 6.2), GREY)
    label(ax, 1.9, 5.55, "root: emitted last round,\nnot yet read", 8, GREY)

    # 2. verification and rule
    label(ax, 0.2, 4.1, "2  verify", 12, weight="bold")
    label(ax, 1.5, 4.1, "one target forward over all nodes (ancestor mask, position = depth) gives p at every node")
    label(ax, 0.2, 3.6, "3  apply the rule", 12, weight="bold")
    label(
        ax, 2.75, 3.6, "the walk goes down from the root: at every node it knows p, the drafter's q and the children C"
    )
    lines = [
        (EXACT, "y ~ p is a child: go down  (the exact rule does the same)"),
        (
            GATE,
            "y is no child, but the gate D(p, q) ≤ T is open: redraw y ~ p within C, go down; spends −ln p(C) nats",
        ),
        (TARGET, "y is no child and the gate is closed, or the node is a leaf: emit y, the round ends"),
    ]
    for i, (colour, text) in enumerate(lines):
        box(ax, 1.75, 3.1 - 0.42 * i, "", colour, 0.4, 0.26)
        label(ax, 2.1, 3.1 - 0.42 * i, text)
    box(ax, 11.7, 5.4, "own", TARGET)
    arrow(ax, (10.28, 5.4), (11.22, 5.4), INK, 2.0)
    label(ax, 12.3, 5.75, "this round emits 4 tokens:\nstar · in · our · own", 9)
    label(ax, 12.3, 5.1, "accepted length τ = 4\n(the target's own token counts)", 8, GREY)

    # 3. cache
    label(ax, 0.2, 1.75, "4  commit the cache", 12, weight="bold")
    label(
        ax,
        3.25,
        1.75,
        "the accepted path's keys and values move to where the text ends; nothing else in the cache is copied",
    )
    words = ["The", "sun", "is", "a", "big", "star", "very", "that", "in", "shines", "is", "our"]
    colours = [TARGET] * 4 + [REJECT, EXACT, REJECT, REJECT, GATE, REJECT, REJECT, EXACT]
    for i, (word, colour) in enumerate(zip(words, colours, strict=True)):
        box(ax, 0.8 + i * 1.1, 0.75, word, colour, 0.98, 0.42, 9, INK if colour != REJECT else GREY)
        label(ax, 0.8 + i * 1.1, 0.3, str(i), 7, GREY, "center")
    label(ax, 13.6, 0.75, "slots of the\nstatic cache", 8, GREY)
    for source, destination in ((5, 4), (8, 5), (11, 6)):
        start, end = 0.8 + source * 1.1, 0.8 + destination * 1.1
        ax.add_patch(
            FancyArrowPatch(
                (start, 0.98),
                (end, 0.98),
                connectionstyle="arc3,rad=0.11",
                arrowstyle="-|>",
                mutation_scale=10,
                color=INK,
            )
        )
    figure.savefig(
        Path(__file__).parent.parent / "docs" / "figures" / "round.png", bbox_inches="tight", facecolor="white"
    )


if __name__ == "__main__":
    main()
