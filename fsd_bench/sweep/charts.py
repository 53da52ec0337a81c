"""Draw charts as inline SVG: points with intervals, lines, histograms. Series differ in mark, dash and colour."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#111111", "#0057b8", "#b8400e", "#147a3d", "#7b2d8b", "#8a6d00", "#00747a", "#a3134a")  # one lightness
DASHES = ((), (7, 3), (2, 3), (10, 3, 2, 3), (4, 2), (1, 2), (12, 4), (6, 2, 1, 2))
MARKS = "osD^v*PX"


@dataclass(frozen=True)
class Point:
    """A point with its intervals. ``label`` is shown next to it."""

    x: float
    y: float
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points that a line joins, with a band through their intervals."""

    name: str
    points: Sequence[Point]
    style: int


def chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], x_ticks: Sequence[tuple[float, str]] = ()
) -> str:
    """Draw series over two axes with a legend. ``x_ticks``: (place, text) in place of round numbers."""
    figure, axes = _axes(title, x_label, y_label)
    for one in series:
        colour, dashes, mark = _style(one.style)
        points = [(p.x, p.y) for p in one.points]
        axes.plot(*zip(*points), color=colour, dashes=dashes, marker=mark, markersize=5, label=_short(one.name))
        if tall := [(p.x, *p.y_range) for p in one.points if p.y_range is not None]:
            x, low, high = zip(*tall)
            axes.vlines(x, low, high, color=colour, linewidth=1, alpha=0.6)
            axes.fill_between(x, low, high, color=colour, linewidth=0, alpha=0.12)
        if wide := [(p.y, *p.x_range) for p in one.points if p.x_range is not None]:
            y, low, high = zip(*wide)
            axes.hlines(y, low, high, color=colour, linewidth=1, alpha=0.6)
        for p in one.points:
            axes.annotate(p.label, (p.x, p.y), (5, 4), textcoords="offset points", fontsize=7)
    if x_ticks:
        axes.set_xticks(*zip(*x_ticks))
    return _svg(figure, axes)


def bars(
    title: str, x_label: str, y_label: str, edges: Sequence[float], series: Sequence[tuple[str, Sequence[float], int]]
) -> str:
    """Draw histograms as outlines over shared bins: (name, share of each bin, style)."""
    figure, axes = _axes(title, x_label, y_label)
    for name, shares, style in series:
        colour, dashes, _ = _style(style)
        axes.stairs(shares, edges, color=colour, linestyle=(0, dashes or None), linewidth=1.5, label=_short(name))
    return _svg(figure, axes)


def _axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.8, 4.7), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, fontweight="bold", loc="left")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(style: int) -> tuple[str, tuple[int, ...], str]:
    return COLOURS[style % len(COLOURS)], DASHES[style % len(DASHES)], MARKS[style % len(MARKS)]


def _short(name: str) -> str:
    return name if len(name) <= 21 else name[:20] + "…"


def _svg(figure: Figure, axes: Axes) -> str:
    """Return the figure as an SVG element. Text stays text, and equal figures have equal ids."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    out = io.StringIO()
    metadata = {"Title": axes.get_title("left"), **dict.fromkeys(("Creator", "Date", "Format", "Type"))}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fsd"}):
        figure.savefig(out, format="svg", metadata=metadata)
    return out.getvalue()[out.getvalue().index("<svg") :]
