"""Draws the pictures of docs/findings.md from the records that it cites.

Run: python -m benchmarks.draw_findings [NAMES ...] (needs matplotlib; default: all)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
STYLES = (  # colour, marker: the marker alone distinguishes families in greyscale
    ("#111111", "X"), ("#0057b8", "o"), ("#b8400e", "s"), ("#147a3d", "^"), ("#7b2d8b", "D"), ("#8a6d00", "v"),
    ("#00747a", "P"), ("#a3134a", "<"), ("#555555", ">"), ("#4269d0", "h"), ("#ff725c", "*"), ("#9c6b4e", "p"),
)  # fmt: skip
Point = tuple[str, str, dict[str, float], dict[str, float]]  # family, label, x and y with "low" and "high"


def points(
    name: str, y: str, scale: float = 1.0, temperature: str = "0", without: Sequence[str] = (), only: Sequence[str] = ()
) -> list[Point]:
    """Of a record of `benchmarks.findings`: each setting's τ over exact's and its ``y`` less exact's.

    Settings with a tree of their own, and families in ``without`` or not in ``only``, are left out.
    """
    found = []
    for rule, facts in read(name)["temperatures"][temperature].items():
        family = _family(rule)
        if rule != "exact" and "@" not in rule and family not in without and (not only or family in only):
            across, up = facts["ratios"]["tau"], facts["differences"][y]
            found.append((family, _label(rule), _centred(across, "ratio"), _centred(up, "mean", scale)))
    return found


def _centred(found: dict[str, float], key: str, scale: float = 1.0) -> dict[str, float]:
    return {"at": scale * found[key], "low": scale * found["low"], "high": scale * found["high"]}


def _family(rule: str) -> str:
    name, *rest = rule.split(":")
    options = [part.split("=")[0] for part in rest if "=" in part]
    return " ".join([name, *options])


def _label(rule: str) -> str:
    return " ".join(part.rpartition("=")[2] for part in rule.split(":")[1:] if part != "js" and "no_repeat" not in part)


def scatter(ax: Any, found: Sequence[Point], x_label: str, y_label: str) -> None:
    """Points with 95 % intervals, a line through each family, exact at (1, 0)."""
    ax.axhline(0, color="#999999", linewidth=0.8)
    ax.axvline(1, color="#999999", linewidth=0.8)
    ax.plot(1, 0, marker="X", color="#111111", markersize=8, linestyle="none", label="exact")
    for number, family in enumerate(dict.fromkeys(one[0] for one in found)):
        colour, marker = STYLES[(number + 1) % len(STYLES)]
        own = sorted((one for one in found if one[0] == family), key=lambda one: one[2]["at"])
        x, y = ([one[place]["at"] for one in own] for place in (2, 3))
        ax.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.2, label=family)
        for _, label, across, up in own:
            ax.plot([across["low"], across["high"]], [up["at"]] * 2, color=colour, linewidth=0.7, alpha=0.5)
            ax.plot([across["at"]] * 2, [up["low"], up["high"]], color=colour, linewidth=0.7, alpha=0.5)
            ax.annotate(label, (across["at"], up["at"]), xytext=(4, 4), textcoords="offset points", fontsize=7)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)


def read(name: str) -> dict[str, Any]:
    """The record of that name."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


PICTURES: dict[str, Callable[[Figure], None]] = {}
TAU, LIKELIHOOD = "tokens per forward / exact's", "log-likelihood per token"


def picture(draw: Callable[[Figure], None]) -> Callable[[Figure], None]:
    """Decorator: files a picture under its function's name."""
    PICTURES[draw.__name__] = draw
    return draw


def bench_points(name: str, y: str, scale: float = 1.0) -> list[Point]:
    """Of a record of `fsd-infer bench` or `benchmarks.compare_rules`, as :func:`points`; x without intervals."""
    record = read(name)
    exact = record["baseline"]
    found = []
    for method, facts in record["methods"].items():
        if method.startswith("exact"):
            continue
        rule, up = method, record["differences"][exact][method][y]
        for option in ("no_repeat", "gate"):
            rule = rule.replace(f"{option} ", f"{option}=")
        rule = rule.replace(" ", ":")
        across = facts["tau"] / record["methods"][exact]["tau"]
        found.append(
            (_family(rule), _label(rule), dict.fromkeys(("at", "low", "high"), across), _centred(up, "mean", scale))
        )
    return found


def side_by_side(figure: Figure, *panels: tuple[list[Point], str]) -> None:
    """A scatter per (points, label of y), over tokens per forward."""
    for ax, (found, label) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        scatter(ax, found, TAU, f"{label} less exact's, {'nats' if label == LIKELIHOOD else 'points'}")


GATED = ("fuzzy-strict", "tilted gate")


@picture
def random(figure: Figure) -> None:
    """Gates and tilted rules beside random gates, on word problems."""
    panels = (("score", "score"), ("repeated_4grams", "repeated 4-grams"))
    side_by_side(figure, *((points("findings-maths", y, 100, without=GATED), label) for y, label in panels))


@picture
def rivals(figure: Figure) -> None:
    """Likelihood and repetition beside tokens per forward, with lookup, temperature 0."""
    record = "rules-smollm2-135m-t0-lookup"
    side_by_side(
        figure,
        (bench_points(record, "log_likelihood_per_token"), LIKELIHOOD),
        (bench_points(record, "repeated_4grams", 100), "repeated 4-grams"),
    )


@picture
def summaries(figure: Figure) -> None:
    """ROUGE-L and likelihood beside tokens per forward, on summaries and translations, with lookup."""
    panels = (("score", 100, "ROUGE-L"), ("log_likelihood_per_token", 1, LIKELIHOOD))
    records = ("findings-rouge", "findings-rouge-2")
    side_by_side(
        figure,
        *(([one for record in records for one in bench_points(record, y, by)], label) for y, by, label in panels),
    )


@picture
def temperatures(figure: Figure) -> None:
    """Score beside tokens per forward at temperatures 0.7 and 1, on word problems."""
    panels = ("0.7", "1")
    side_by_side(
        figure, *((points("findings-maths-warm", "score", 100, at), f"temperature {at}: score") for at in panels)
    )


@picture
def gates(figure: Figure) -> None:
    """What the same gate costs and wins by what it emits."""
    only, record = ("fuzzy", "tilted", *GATED), "findings-maths"
    side_by_side(
        figure,
        (points(record, "log_likelihood_per_token", only=only), LIKELIHOOD),
        (points(record, "score", 100, only=only), "score"),
    )


@picture
def budget(figure: Figure) -> None:
    """Nats that answers of a gate and of a tilted rule spent, with a budget of 2 and without one."""
    ax = figure.subplots(1, 1)
    found = read("findings-maths-budget")["temperatures"]["0"]
    rules = ("fuzzy:js:0.5", "tilted:0.5")
    for shift, option, colour, label in ((-0.2, "", "#b8400e", "no budget"), (0.2, ":budget=2", "#0057b8", "budget 2")):
        spent = [found[rule + option]["nats_per_answer"] for rule in rules]
        x = [place + shift for place in range(len(rules))]
        ax.bar(x, [one["most"] for one in spent], 0.36, color=colour, alpha=0.35, label=f"{label}: most")
        ax.bar(x, [one["mean"] for one in spent], 0.36, color=colour, label=f"{label}: mean")
    ax.axhline(2, color="#111111", linewidth=1, linestyle="--")
    ax.set_xticks(range(len(rules)), rules)
    ax.set_ylabel("nats spent per answer")


@picture
def trees(figure: Figure) -> None:
    """Tokens per forward of three rules on a wide and on a deep tree."""
    ax = figure.subplots(1, 1)
    found = read("findings-maths")["temperatures"]["0"]
    rules = ("exact", "fuzzy:js:0.4", "tilted:1")
    for place, rule in enumerate(rules):
        for shift, name, colour in ((-0.2, f"{rule}@6x4x9x0.5", "#b8400e"), (0.2, rule, "#0057b8")):
            tau = found[name]["tau"]
            ax.bar(place + shift, tau, 0.36, color=colour, label=None if place else "6,4,9" if shift < 0 else "10,2,13")
            ax.annotate(f"{tau:.2f}", (place + shift, tau), ha="center", va="bottom", fontsize=8)
    ax.set_xticks(range(len(rules)), rules)
    ax.set_ylabel("tokens per forward")


@picture
def batches(figure: Figure) -> None:
    """Tokens per second of whole batches over plain decoding's."""
    ax = figure.subplots(1, 1)
    record = read("batch-rules")["batches"]
    sizes = sorted(map(int, record))
    methods = [name for name in record[str(sizes[0])]["methods"] if name != "plain"]
    for method, (colour, marker) in zip(methods, STYLES, strict=False):
        found = [record[str(size)]["methods"] for size in sizes]
        speed = [one[method]["tokens_per_second"] / one["plain"]["tokens_per_second"] for one in found]
        ax.plot(sizes, speed, color=colour, marker=marker, linewidth=1.2, label=method)
    ax.axhline(1, color="#999999", linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, map(str, sizes))
    ax.set_xlabel("prompts decoded together")
    ax.set_ylabel("tokens per second / plain decoding's")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw those named, or all."""
    for name in (sys.argv[1:] if argv is None else argv) or PICTURES:
        figure = Figure(figsize=(10.5, 4.2), dpi=110, layout="constrained")
        PICTURES[name](figure)
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
        figure.savefig(FIGURES / f"finding-{name}.png", facecolor="white")
    return 0


if __name__ == "__main__":
    sys.exit(main())
