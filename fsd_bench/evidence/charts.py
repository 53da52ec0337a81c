"""Charts as SVG text: points with intervals, lines, histograms. Shape and dash distinguish series, not colour alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 62, 150, 30, 46
COLOURS = ("#111111", "#0057b8", "#b8400e", "#147a3d", "#7b2d8b", "#8a6d00", "#00747a", "#a3134a")  # one lightness
DASHES = ("", "7 3", "2 3", "10 3 2 3", "4 2", "1 2", "12 4", "6 2 1 2")
MARKS = 8


@dataclass(frozen=True)
class Point:
    """x, y and their intervals; ``label`` is shown beside it and ``title`` where the pointer rests on it."""

    x: float
    y: float
    label: str = ""
    title: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined by a line and a band through their intervals if ``joined``."""

    name: str
    points: Sequence[Point]
    style: int
    joined: bool = True


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover low..high."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if (high - low) / (step * factor) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(step * n, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """The axes of a chart, and where numbers lie on them."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.x, self.y = _padded(xs), _padded(ys)

    def px(self, x: float) -> float:
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        return HEIGHT - BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_label: str, y_label: str, x_ticks: Sequence[tuple[float, str]] = ()) -> list[str]:
        right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
        parts = [f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>']
        for value, text in x_ticks or [(value, f"{value:g}") for value in ticks(*self.x)]:
            parts.append(f'<path class="grid" d="M{self.px(value):.1f} {TOP}V{bottom}"/>')
            parts.append(_text(self.px(value), bottom + 15, text, "middle"))
        for value in ticks(*self.y):
            parts.append(f'<path class="grid" d="M{LEFT} {self.py(value):.1f}H{right}"/>')
            parts.append(_text(LEFT - 6, self.py(value) + 4, f"{value:g}", "end"))
        middle = (TOP + bottom) / 2
        parts.append(_text((LEFT + right) / 2, HEIGHT - 10, x_label, "middle", "label"))
        turned = f'<text class="label" text-anchor="middle" transform="translate(14 {middle}) rotate(-90)">'
        return [*parts, f"{turned}{escape(y_label)}</text>"]


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], x_ticks: Sequence[tuple[float, str]] = ()
) -> str:
    """Series over two axes, with a legend. ``x_ticks``: (place, text) where round numbers will not do."""
    points = [point for one in series for point in one.points]
    frame = _Frame(
        [x for p in points for x in (p.x, *(p.x_range or ())) if math.isfinite(x)],
        [y for p in points for y in (p.y, *(p.y_range or ())) if math.isfinite(y)],
    )
    parts = frame.axes(x_label, y_label, x_ticks)
    for one in series:
        parts += _band(frame, one)
    for one in series:
        parts += _series(frame, one)
    for row, one in enumerate(series):
        x, y = WIDTH - RIGHT + 12, TOP + 8 + 18 * row
        if one.joined and len(one.points) > 1:
            parts.append(f'<path {_stroke(one.style)} d="M{x - 6} {y}h18"/>')
        parts.append(_mark(x + 3, y, one.style))
        parts.append(_text(x + 16, y + 4, _short(one.name), "start"))
    return _svg(title, parts)


def bars(
    title: str, x_label: str, y_label: str, edges: Sequence[float], series: Sequence[tuple[str, Sequence[float], int]]
) -> str:
    """Histograms as outlines over shared bins: (name, share of each bin, style)."""
    frame = _Frame([edges[0], edges[-1]], [0.0, *(share for _, shares, _ in series for share in shares)])
    parts = frame.axes(x_label, y_label)
    for row, (name, shares, style) in enumerate(series):
        path = f"M{frame.px(edges[0]):.1f} {frame.py(0):.1f}"
        for share, end in zip(shares, edges[1:], strict=True):
            path += f"V{frame.py(share):.1f}H{frame.px(end):.1f}"
        path += f"V{frame.py(0):.1f}"
        parts.append(f'<path {_stroke(style)} d="{path}"><title>{escape(name)}</title></path>')
        x, y = WIDTH - RIGHT + 12, TOP + 8 + 18 * row
        parts.append(f'<path {_stroke(style)} d="M{x - 6} {y}h18"/>')
        parts.append(_text(x + 16, y + 4, _short(name), "start"))
    return _svg(title, parts)


def _band(frame: _Frame, one: Series) -> list[str]:
    known = [point for point in one.points if point.y_range is not None]
    if not one.joined or len(known) < 2:
        return []
    upper = [f"{frame.px(p.x):.1f} {frame.py(p.y_range[1]):.1f}" for p in known]  # type: ignore[index]
    lower = [f"{frame.px(p.x):.1f} {frame.py(p.y_range[0]):.1f}" for p in reversed(known)]  # type: ignore[index]
    return [f'<path class="band" fill="{_colour(one.style)}" d="M{"L".join([*upper, *lower])}Z"/>']


def _series(frame: _Frame, one: Series) -> list[str]:
    parts = []
    if one.joined and len(one.points) > 1:
        path = "L".join(f"{frame.px(p.x):.1f} {frame.py(p.y):.1f}" for p in one.points)
        parts.append(f'<path {_stroke(one.style)} d="M{path}"/>')
    for p in one.points:
        x, y = frame.px(p.x), frame.py(p.y)
        whiskers = ""
        if p.y_range is not None:
            whiskers += f"M{x:.1f} {frame.py(p.y_range[0]):.1f}V{frame.py(p.y_range[1]):.1f}"
        if p.x_range is not None:
            whiskers += f"M{frame.px(p.x_range[0]):.1f} {y:.1f}H{frame.px(p.x_range[1]):.1f}"
        if whiskers:
            parts.append(f'<path class="whisker" stroke="{_colour(one.style)}" d="{whiskers}"/>')
        parts.append(f"<g>{_mark(x, y, one.style)}<title>{escape(p.title or p.label)}</title></g>")
        if p.label:
            parts.append(_text(x + 7, y - 6, p.label, "start", "value"))
    return parts


def _mark(x: float, y: float, style: int) -> str:
    """One of eight shapes."""
    r, colour = 4.5, _colour(style)
    kind = style % MARKS
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}"/>'
    if kind == 1:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="#fff" stroke="{colour}" stroke-width="1.8"/>'
    if kind in (6, 7):
        lines = f"M{x - r:.1f} {y:.1f}h{2 * r}M{x:.1f} {y - r:.1f}v{2 * r}" if kind == 6 else (
            f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
        )  # fmt: skip
        return f'<path d="{lines}" stroke="{colour}" stroke-width="2.2"/>'
    shape = {
        2: f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        3: f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {2 * r}h{-2 * r - 2}z",
        4: f"M{x:.1f} {y - r - 1.5:.1f}l{r + 1.5} {r + 1.5}l{-r - 1.5} {r + 1.5}l{-r - 1.5} {-r - 1.5}z",
        5: f"M{x:.1f} {y + r + 1:.1f}l{r + 1} {-2 * r}h{-2 * r - 2}z",
    }[kind]
    hollow = style // MARKS % 2
    return f'<path d="{shape}" fill="{"#fff" if hollow else colour}" stroke="{colour}" stroke-width="1.5"/>'


def _stroke(style: int) -> str:
    return f'class="line" stroke="{_colour(style)}" stroke-dasharray="{DASHES[style % len(DASHES)]}"'


def _colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= 21 else name[:20] + "…"


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return head + _text(LEFT, 18, title, "start", "title") + "".join(parts) + "</svg>"
