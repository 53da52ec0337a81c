"""The record and the picture of :mod:`benchmarks.ladder`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsd_bench.intervals import mean_interval, ratio_interval
from fsd_bench.record import write_record
from fsd_infer.files import jsonable

COSTS = (0.05, 0.1, 0.2, 0.4, 1.0)  # of a drafted token, in target forwards
# What equal quality means: at most so far on the wrong side of exact's. Points, nats per token, points, points.
BOUNDS = {"score": -0.02, "likelihood": -0.05, "copied": 0.02, "repeated": 0.02}


def write_ladder(files: Sequence[Path], path: Path) -> dict[str, Any]:
    """Every line beside exact decoding on its rung, with paired 95 % bootstrap intervals over prompts."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    exact = {_rung(line): line for line in lines if line["rule"] == "exact"}
    forecasts = {_rung(line): line["forecast"] for line in lines if line["rule"] == "forecast"}
    rungs: dict[str, Any] = {}
    for key, base in exact.items():
        rules = {
            line["rule"]: compare(line, base) for line in lines if _rung(line) == key and line["rule"] != "forecast"
        }
        target, rung, *others = key
        rungs[" ".join(map(str, (_last(target), _last(rung), *others)))] = {
            "target": _last(target),
            "rung": _last(rung),
            **{name: base[name] for name in ("temperature", "depth", "prompts", "every", "tokens")},
            "answers": len(base["rows"]),
            "drafts": base["drafts"],
            "environment": {**base["environment"], "command": _shown(base["environment"]["command"])},
            "rules": rules,
            **({"forecast": forecast_rows(forecasts[key], base["depth"], rules)} if key in forecasts else {}),
        }
    made = {"bounds": BOUNDS, "rungs": rungs}
    write_record(path, jsonable(made))
    return made


def forecast_rows(forecast: dict[str, Any], depth: int, measured: dict[str, Any]) -> dict[str, Any]:
    """By rule: τ and nats forecast for chains of ``depth``, τ beside the measured one, and tokens per cost beside
    exact's, each on its own best chain.
    """
    exact = forecast["rows"][0]["per_cost"]
    found = {}
    for row in forecast["rows"]:
        (shaped,) = (s for s in row["shapes"] if s["shape"]["depth"] == depth and not s["shape"]["stop_below"])
        tau = measured.get(row["rule"], {}).get("tau")
        found[row["rule"]] = {
            "tau": shaped["tau"],
            "plain_tau": shaped["plain_tau"],
            "nats_per_token": shaped["nats"],
            "tau_ratio": shaped["tau"] / tau if tau else None,
            "plain_tau_ratio": shaped["plain_tau"] / tau if tau else None,
            "per_cost": {cost: value / exact[cost] for cost, value in row["per_cost"].items()},
        }
    return found


def _last(name: str) -> str:
    """Of a path its last part; other names as they are."""
    return Path(name).name if Path(name).is_absolute() else name


def _shown(command: str) -> str:
    """A command without this machine's paths."""
    return " ".join(_last(word) for word in command.split())


def _rung(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["target"], line["rung"], line["temperature"], line["prompts"], len(line["rows"])


def compare(line: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Means of a rule's answers, and how they differ from exact's on the same prompts."""
    own, other = line["rows"], base["rows"]
    length, forwards = (np.array([row[name] for row in own], float) for name in ("length", "forwards"))
    tokens = length.sum()
    found: dict[str, Any] = {
        "tau": float((tokens - len(own)) / forwards.sum()) if line["rule"] != "alone" else None,
        "tokens": float(length.mean()),
        "forwards": float(forwards.mean()),
        "nats_per_token": float(sum(row["nats"] for row in own) / tokens),
        "likelihood": _likelihood(own),
        **{name: _mean(own, name) for name in ("score", "copied", "repeated")},
    }
    if line["rule"] == "exact":
        return found
    found["differences"] = {name: _difference(own, other, name) for name in ("score", "copied", "repeated")}
    found["differences"]["likelihood"] = _likelihood_difference(own, other)
    depth = line["depth"]
    if line["rule"] == "alone":
        found["speed"] = {f"{cost:g}": _alone_speed(other, depth, cost) for cost in COSTS}
        return found
    found["gain"] = ratio_interval(*([(row["length"] - 1, row["forwards"]) for row in rows] for rows in (own, other)))
    found["equal"] = within(found["differences"])
    return found


def within(differences: dict[str, Any]) -> bool:
    """Is the quality equal, by :data:`BOUNDS`, as measured."""
    for name, bound in BOUNDS.items():
        difference = differences[name]
        if difference is not None and (difference["mean"] < bound if bound < 0 else difference["mean"] > bound):
            return False
    return True


def _alone_speed(exact: list[dict[str, Any]], depth: int, cost: float) -> float:
    """The drafter's tokens per cost beside exact's, whose round costs a forward and ``depth`` drafts."""
    tokens, forwards = (sum(row[name] for row in exact) for name in ("length", "forwards"))
    return (1 + depth * cost) * forwards / (cost * tokens)


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return float(np.mean(values)) if values else None


def _likelihood(rows: list[dict[str, Any]]) -> float:
    return float(sum(r["likelihood"] * r["length"] for r in rows) / sum(r["length"] for r in rows))


def _difference(own: list[dict[str, Any]], other: list[dict[str, Any]], name: str) -> dict[str, float] | None:
    pairs = [(a[name], b[name]) for a, b in zip(own, other) if a[name] is not None and b[name] is not None]
    return mean_interval(*([(value, 1) for value in values] for values in zip(*pairs))) if pairs else None


def _likelihood_difference(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    return mean_interval(*([(r["likelihood"] * r["length"], r["length"]) for r in rows] for rows in (own, other)))


def write_figure(made: dict[str, Any], path: Path) -> None:
    """Gain in tokens per forward against the median regret of a mistake: one line a rule, hollow where quality fell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {(rung["target"], rung["prompts"], rung["temperature"]) for rung in made["rungs"].values()}
    figure, axes = plt.subplots(1, len(kinds), figsize=(6.2 * len(kinds), 4.6), squeeze=False, sharey=True)
    for axis, kind in zip(axes[0], sorted(kinds, key=str)):
        rungs = [r for r in made["rungs"].values() if (r["target"], r["prompts"], r["temperature"]) == kind]
        rungs.sort(key=lambda rung: rung["drafts"]["regret_median"] or 0)
        rules = [rule for rule in rungs[0]["rules"] if rule not in ("exact", "alone")]
        for number, rule in enumerate(rules):
            points = [(r["drafts"]["regret_median"], r["rules"][rule]) for r in rungs if rule in r["rules"]]
            colour = f"C{number}"
            axis.plot([x for x, _ in points], [y["gain"]["ratio"] for _, y in points], color=colour, label=rule, lw=1.2)
            for x, y in points:
                face = colour if y["equal"] else "white"
                axis.plot([x], [y["gain"]["ratio"]], "o", color=colour, markerfacecolor=face, ms=6)
        for rung in rungs:
            axis.annotate(
                rung["rung"].rstrip("/").split("/")[-1], (rung["drafts"]["regret_median"], 0.97), rotation=40,
                fontsize=6, ha="right", va="top",
            )  # fmt: skip
        axis.set_title(f"{kind[0].rstrip('/').split('/')[-1]}, {kind[1]}, temperature {kind[2]:g}", fontsize=9)
        axis.set_xlabel("median regret of a wrong first draft, nats")
        axis.axhline(1.0, color="grey", lw=0.8)
        axis.set_ylim(bottom=0.7)
    axes[0][0].set_ylabel("tokens per forward, times exact's")
    axes[0][-1].legend(fontsize=7, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
